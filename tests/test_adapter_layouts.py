"""Adapters in the names of other implementations: diffusers' converters of checkpoints and of adapters, which are
written apart from ours, find the same change of the same weights in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from adapter_files import RANK, adapters_of, changes_of, check_equal, read, written
from diffusers import (
    Flux2KleinPipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    QwenImagePipeline,
    StableDiffusion3Pipeline,
    WanImageToVideoPipeline,
    WanPipeline,
    ZImagePipeline,
)
from diffusers.loaders import single_file_utils
from peft import PeftModel
from torch import Tensor
from unirl.core.errors import PluginBroken, RecipeError
from unirl.core.specs.spec import AdapterLayout, ModelSpec
from unirl.models.flux2_klein.plugin import SPEC as FLUX2
from unirl.models.hunyuan_video.plugin import SPEC as HUNYUAN_VIDEO
from unirl.models.hunyuan_video15.plugin import SPEC as HUNYUAN_VIDEO15
from unirl.models.qwen_image.plugin import EDIT, EDIT_PLUS
from unirl.models.qwen_image.plugin import SPEC as QWEN_IMAGE
from unirl.models.sd3.plugin import SPEC as SD3
from unirl.models.wan.plugin import WAN21, WAN21_I2V
from unirl.models.z_image.plugin import SPEC as Z_IMAGE
from unirl.tools.export.adapters import write_diffusers_adapters, write_peft_adapters

STEP = 1e-5
"""An output after some layers, of weights that differ by ROUNDING."""
FAR = 1e-2


@dataclass(frozen=True, kw_only=True)
class Case:
    spec: ModelSpec
    pipeline: Any
    layers: str
    """The layers of its transformer that get adapters: all that a converter knows."""
    originals: str
    """The layers of the original's module. Converters leave names that they do not know as they are."""
    convert: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
    """diffusers' converter of original checkpoints."""


def with_zeros(convert: Callable[[Any], Mapping[str, Tensor]]) -> Callable[[dict[str, Tensor]], Mapping[str, Tensor]]:
    """A converter that is given all tensors: those without a change are zeros."""

    class Zeros(dict[str, Tensor]):
        def __missing__(self, key: str) -> Tensor:
            return torch.zeros(6, 1)

        def pop(self, key: str, *default: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().pop(key, torch.zeros(6, 1))

    return lambda changes: convert(Zeros(changes))


CASES = [
    Case(
        spec=SD3,
        pipeline=StableDiffusion3Pipeline,
        layers=r"transformer_blocks\.\d\.(attn2?\..*|ff(_context)?\..*|norm1\.linear)",
        originals=r"joint_blocks\.\d\.(x|context)_block\.(attn2?\.(qkv|proj)|mlp\.fc[12]|adaLN_modulation\.1)",
        convert=with_zeros(single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers),
    ),
    *(
        Case(
            spec=spec,
            pipeline=pipeline,
            layers=r"blocks\.\d\..*",
            originals=r"blocks\.\d\.((self|cross)_attn\.([qkvo]|[kv]_img)|ffn\.[02])",
            convert=single_file_utils.convert_wan_transformer_to_diffusers,
        )
        for spec, pipeline in ((WAN21, WanPipeline), (WAN21_I2V, WanImageToVideoPipeline))
    ),
    Case(
        spec=FLUX2,
        pipeline=Flux2KleinPipeline,
        layers=r"(single_)?transformer_blocks\.\d\..*",
        originals=r"double_blocks\.\d\.(img|txt)_(attn\.(qkv|proj)|mlp\.[02])|single_blocks\.\d\.linear[12]",
        convert=single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers,
    ),
    Case(
        spec=Z_IMAGE,
        pipeline=ZImagePipeline,
        layers=r"(layers|noise_refiner|context_refiner)\.\d\..*",
        originals=r"(layers|\w+_refiner)\.\d\.(attention\.(qkv|out)|feed_forward\.w[123]|adaLN_modulation\.0)",
        convert=single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers,
    ),
    # Published with diffusers' names.
    *(
        Case(
            spec=spec,
            pipeline=QwenImagePipeline,
            layers=r"transformer_blocks\.\d\..*",
            originals=r"transformer_blocks\.\d\.(attn\.(to_([qkv]|out\.0|add_out)|add_[qkv]_proj)"
            r"|(img|txt)_(mod\.1|mlp\.net\.(0\.proj|2)))",
            convert=dict,
        )
        for spec in (QWEN_IMAGE, EDIT, EDIT_PLUS)
    ),
]
BY_NAME = {case.spec.name: case for case in CASES}


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelSpec], tuple[Path, Any]]:
    """The folder of a model's miniature, and diffusers' pipeline of its transformers, loaded once."""
    made: dict[str, tuple[Path, Any]] = {}

    def load(spec: ModelSpec) -> tuple[Path, Any]:
        if spec.name not in made:
            assert spec.tiny is not None
            module, _, name = spec.tiny.write.partition(":")
            folder = tmp_path_factory.mktemp("miniature") / spec.name
            getattr(import_module(module), name)(folder, seed=0)
            pipeline = BY_NAME[spec.name].pipeline
            parts = {name: None for name in ("vae", "text_encoder", "text_encoder_2", "text_encoder_3")}
            own = {name: value for name, value in parts.items() if name in pipeline.__init__.__annotations__}
            made[spec.name] = folder, pipeline.from_pretrained(folder, **own)
        return made[spec.name]

    return load


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.spec.name)
def test_a_converter_of_original_checkpoints_finds_the_same_changes(
    case: Case, pipelines: Callable[[ModelSpec], tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, pipeline = pipelines(case.spec)
    module, spec = pipeline.transformer, case.spec
    update = adapters_of(module, case.layers)
    expected = changes_of(update)
    comfy = written("comfy", update, tmp_path / "comfy.safetensors", spec=spec, module=module, base=folder)
    # ComfyUI keeps original checkpoints as they are, below this name.
    changes = read(comfy, "diffusion_model.")
    assert [name for name in changes if not re.fullmatch(rf"({case.originals})\.weight", name)] == []
    check_equal(case.convert(dict(changes)), expected)
    if "original" in spec.adapter_layouts:
        original = written("original", update, tmp_path / "original.safetensors", spec=spec, module=module, base=folder)
        assert original.keys() == {name.removeprefix("diffusion_model.") for name in comfy}
        check_equal(case.convert(read(original)), expected)
    kohya = written("kohya", update, tmp_path / "kohya.safetensors", spec=spec, module=module, base=folder)
    assert all(
        value == len(kohya[name.replace("alpha", "lora_down.weight")])
        for name, value in kohya.items()
        if not value.ndim
    )
    # kohya's trainers name an adapter after its layer, with underscores; those of Z-Image have diffusers' layers.
    splits = spec is Z_IMAGE
    layers = {name.removesuffix(".weight").replace(".", "_"): name for name in (expected if splits else changes)}
    flat = read(kohya, "lora_unet_")
    named = {layers[name.removesuffix(".weight")]: value for name, value in flat.items()}
    check_equal(named if splits else case.convert(named), expected)


READ_BY_DIFFUSERS: list[tuple[str, AdapterLayout]] = [
    ("wan21", "comfy"),
    ("wan21", "kohya"),
    ("wan21-i2v", "comfy"),
    ("wan21-i2v", "kohya"),
    ("flux2-klein", "comfy"),
    ("flux2-klein", "kohya"),
    ("qwen-image", "comfy"),
    ("qwen-image", "kohya"),
    ("qwen-image-edit", "comfy"),
    ("qwen-image-edit", "kohya"),
    ("qwen-image-edit-plus", "comfy"),
    ("qwen-image-edit-plus", "kohya"),
    ("z-image", "kohya"),
]


@pytest.mark.parametrize(("name", "layout"), READ_BY_DIFFUSERS)
def test_diffusers_converts_the_adapters_back(
    name: str, layout: AdapterLayout, pipelines: Callable[[ModelSpec], tuple[Path, Any]], tmp_path: Path
) -> None:
    case, file = BY_NAME[name], tmp_path / "adapters.safetensors"
    folder, pipeline = pipelines(case.spec)
    update = adapters_of(pipeline.transformer, case.layers)
    written(layout, update, file, spec=case.spec, module=pipeline.transformer, base=folder)
    result = pipeline.lora_state_dict(file)
    if isinstance(result, tuple):
        result = result[0]
    found = read({name.removeprefix("transformer."): tensor for name, tensor in result.items()})
    check_equal(found, changes_of(update))


@pytest.mark.parametrize(
    "layers",
    [r"(single_)?transformer_blocks\..*", r"context_embedder\.token_refiner\.refiner_blocks\.\d\.(attn|ff)\..*"],
    ids=["blocks", "text"],
)
def test_hunyuan_video_has_the_original_names_at_its_real_size(layers: str, tmp_path: Path) -> None:
    """diffusers' converters take no other width."""
    (tmp_path / "model_index.json").write_text("{}")
    with torch.device("meta"):
        module = HunyuanVideoTransformer3DModel(num_layers=1, num_single_layers=1, num_refiner_layers=1)
    # What a block changes of its norms' output is a linear layer as well.
    update = adapters_of(module, layers)
    expected = changes_of(update)
    files = {
        layout: written(
            layout, update, tmp_path / f"{layout}.safetensors", spec=HUNYUAN_VIDEO, module=module, base=tmp_path
        )
        for layout in get_args(AdapterLayout)
    }
    changes = read(files["original"])
    names = (
        r"(double_blocks\.0\.(img|txt)_(attn_(qkv|proj)|mlp\.fc[12]|mod\.linear)"
        r"|single_blocks\.0\.(linear[12]|modulation\.linear)"
        r"|txt_in\.individual_token_refiner\.blocks\.0\.(self_attn_(qkv|proj)|mlp\.fc[12]))\.weight"
    )
    assert [name for name in changes if not re.fullmatch(names, name)] == []
    check_equal(single_file_utils.convert_hunyuan_video_transformer_to_diffusers(dict(changes)), expected)
    assert read(files["comfy"], "diffusion_model.").keys() == changes.keys()
    flat = {name.removesuffix(".weight").replace(".", "_") for name in changes}
    assert {name.removesuffix(".weight") for name in read(files["kohya"], "lora_unet_")} == flat
    if "single" in layers:
        for layout in ("original", "comfy"):
            result: Any = HunyuanVideoPipeline.lora_state_dict(tmp_path / f"{layout}.safetensors")
            check_equal(read({name.removeprefix("transformer."): value for name, value in result.items()}), expected)


def test_hunyuan_video15_has_separate_projections_in_the_original_and_fused_ones_in_comfyui(tmp_path: Path) -> None:
    """Names by tencent/HunyuanVideo-1.5, and by musubi-tuner's conversion of adapters of it for ComfyUI."""
    streams = {
        "img": ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2", "norm1.linear"),
        "txt": (
            "attn.add_q_proj",
            "attn.add_k_proj",
            "attn.add_v_proj",
            "attn.to_add_out",
            "ff_context.net.0.proj",
            "ff_context.net.2",
            "norm1_context.linear",
        ),
    }
    (tmp_path / "model_index.json").write_text("{}")
    module = HunyuanVideo15Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=8,
        text_embed_2_dim=8,
        image_embed_dim=8,
        rope_axes_dim=(4, 6, 6),
    )
    update = adapters_of(module, r"transformer_blocks\.\d\..*")
    expected = changes_of(update)
    found: dict[AdapterLayout, dict[str, Tensor]] = {}
    for layout, prefix in (("original", ""), ("comfy", "diffusion_model."), ("kohya", "lora_unet_")):
        to = tmp_path / f"{layout}.safetensors"
        found[layout] = read(written(layout, update, to, spec=HUNYUAN_VIDEO15, module=module, base=tmp_path), prefix)
    original, comfy = dict[str, Tensor](), dict[str, Tensor]()
    for block in range(2):
        for stream, names in streams.items():
            parts = [expected[f"transformer_blocks.{block}.{name}.weight"] for name in names]
            place = f"double_blocks.{block}.{stream}"
            own = ("attn_q", "attn_k", "attn_v", "attn_proj", "mlp.fc1", "mlp.fc2", "mod.linear")
            original |= {f"{place}_{name}.weight": part for name, part in zip(own, parts, strict=True)}
            fused = [torch.cat(parts[:3]), *parts[3:]]
            own = ("attn.qkv", "attn.proj", "mlp.0", "mlp.2", "mod.lin")
            comfy |= {f"{place}_{name}.weight": part for name, part in zip(own, fused, strict=True)}
    flat = {f"{name.removesuffix('.weight').replace('.', '_')}.weight": part for name, part in original.items()}
    for layout, changes in (("original", original), ("comfy", comfy), ("kohya", flat)):
        assert found[layout].keys() == changes.keys()
        check_equal(found[layout], changes)


def output(name: str, module: Any) -> Tensor:
    """Output of a transformer at fixed inputs."""
    generator, settings = torch.Generator().manual_seed(2), module.config

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    inputs: dict[str, Any]
    if name == "sd3":
        inputs = {
            "hidden_states": noise(2, settings.in_channels, 8, 8),
            "encoder_hidden_states": noise(2, 20, settings.joint_attention_dim),
            "pooled_projections": noise(2, settings.pooled_projection_dim),
        }
    elif name == "wan21":
        inputs = {
            "hidden_states": noise(2, settings.in_channels, 2, 4, 4),
            "encoder_hidden_states": noise(2, 16, settings.text_dim),
        }
    else:
        inputs = {
            "hidden_states": noise(2, 16, settings.in_channels),
            "encoder_hidden_states": noise(2, 8, settings.joint_attention_dim),
            "img_ids": torch.cartesian_prod(torch.arange(1), torch.arange(4), torch.arange(4), torch.arange(1)),
            "txt_ids": torch.cartesian_prod(torch.arange(1), torch.arange(1), torch.arange(1), torch.arange(8)),
        }
    level = 1000 if name != "flux2-klein" else 1
    with torch.no_grad():
        return module(timestep=torch.tensor([0.9, 0.3]) * level, return_dict=False, **inputs)[0]


@pytest.mark.parametrize("name", ["sd3", "wan21", "flux2-klein"])
def test_loaded_adapters_compute_what_merged_weights_do(
    name: str, pipelines: Callable[[ModelSpec], tuple[Path, Any]], tmp_path: Path
) -> None:
    case = BY_NAME[name]
    folder, pipeline = pipelines(case.spec)
    module = pipeline.transformer
    update = adapters_of(module, case.layers)
    comfy = written("comfy", update, tmp_path / "comfy.safetensors", spec=case.spec, module=module, base=folder)
    shared: Any = {
        "components": {"transformer": ""},
        "dtype": torch.float32,
        "metadata": {},
    }
    write_diffusers_adapters(tmp_path, update, **shared)
    (tmp_path / "peft").mkdir()
    write_peft_adapters(tmp_path / "peft", update, module=module, base="base", **shared)
    before = output(name, module)
    merged = type(module).from_pretrained(folder, subfolder="transformer")
    changes = {key: value for key, value in case.convert(read(comfy, "diffusion_model.")).items() if value.any()}
    merged.load_state_dict({key: value + changes.get(key, 0) for key, value in merged.state_dict().items()})
    expected = output(name, merged)
    largest = expected.abs().max()
    assert (before - expected).abs().max() > FAR * largest
    # SD3 is not read by diffusers in another layout than its own.
    for file in ("pytorch_lora_weights.safetensors", *([] if name == "sd3" else ["comfy.safetensors"])):
        pipeline.load_lora_weights(tmp_path / file)
        assert (output(name, module) - expected).abs().max() < STEP * largest, file
        pipeline.unload_lora_weights()
    assert torch.equal(output(name, module), before)
    adapted = PeftModel.from_pretrained(
        type(module).from_pretrained(folder, subfolder="transformer"), tmp_path / "peft"
    )
    assert (output(name, adapted) - expected).abs().max() < STEP * largest


def test_parts_of_a_fused_layer_without_an_adapter_stay_as_they_are(
    pipelines: Callable[[ModelSpec], tuple[Path, Any]], tmp_path: Path
) -> None:
    case = BY_NAME["sd3"]
    folder, pipeline = pipelines(case.spec)
    update = adapters_of(pipeline.transformer, r"transformer_blocks\.\d\.attn\.to_[qv]")
    comfy = written("comfy", update, tmp_path / "comfy.safetensors", spec=SD3, module=pipeline.transformer, base=folder)
    down = comfy["diffusion_model.joint_blocks.0.x_block.attn.qkv.lora_A.weight"]
    up = comfy["diffusion_model.joint_blocks.0.x_block.attn.qkv.lora_B.weight"]
    width = pipeline.transformer.inner_dim
    assert down.shape == (2 * RANK, width) and up.shape == (3 * width, 2 * RANK)
    assert not up[width : 2 * width].any()
    check_equal(case.convert(read(comfy, "diffusion_model.")), changes_of(update))


def test_what_a_layout_has_no_name_for_is_refused(
    pipelines: Callable[[ModelSpec], tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, pipeline = pipelines(SD3)
    module, to = pipeline.transformer, tmp_path / "out.safetensors"
    # The original has its halves in the other order.
    update = adapters_of(module, r"norm_out\.linear|transformer_blocks\.0\.attn\.to_q")
    with pytest.raises(
        RecipeError, match=r"--layout: layer 'norm_out.linear' has an adapter, but no name in layout 'k"
    ):
        written("kohya", update, to, spec=SD3, module=module, base=folder)
    broken = replace(SD3, adapter_layouts={"comfy": "unirl.models.sd3.adapter_layouts:NONE"})
    with pytest.raises(PluginBroken, match=r"model 'sd3' names '.*:NONE' for layout 'comfy'"):
        written("comfy", update, to, spec=broken, module=module, base=folder)
    assert list(tmp_path.iterdir()) == []
