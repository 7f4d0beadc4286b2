"""Batches survive the way through bytes bit for bit, and nothing else gets in or out."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unirl.core.errors import BatchError
from unirl.core.types import serial
from unirl.core.types.batch import same
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.core.types.request import LatentRequest, Request
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig
from unirl.core.types.serial import from_bytes, to_bytes
from unirl.core.types.track import Conditions, LatentSegment, Sampler, Status, TextSegment, Track


def make_request() -> Request:
    sampling = LatentSamplingConfig(sde=SdeStepsConfig(mode="fixed", steps=[1, 3]), kernel_options={"constants": False})
    return Request(
        track="image",
        sample_ids=("a", "b"),
        group_ids=("g", "g"),
        inputs=Inputs(
            ids=("p", "q"),
            prompts=("ein Ring", "?"),
            texts=("ein Ring, groß", "\u2028\x00"),
            media=((MediaRef(modality="image", role="condition", uri="/a.png"),), ()),
        ),
        metadata=({"n": 1, "x": None, "big": 2**80}, {"list": [1, (2.5, True)], "inf": -math.inf}),
        params=LatentRequest(
            sampling=sampling,
            sigmas=torch.tensor([1.0, 1 / 3, 0.0]),
            sde_steps=torch.tensor([[0], [-1]]),
            noise_ids=("a", "b"),
            initial_noise=("", ""),
            keep=torch.tensor([[0, 2], [-1, 1]]),
        ),
        seed=2**63,
        rollout=0,
        policy_version=3,
    )


def make_tracks() -> dict[str, Track]:
    segment = LatentSegment(
        latents=torch.randn(2, 2, 4, 2, 2, generator=torch.Generator().manual_seed(0)),
        positions=torch.tensor([[0, 1], [0, 1]]),
        sde_steps=torch.tensor([[0], [0]]),
        sigmas=torch.tensor([1.0, 0.0]),
        sampler=Sampler(kernel="cps", eta=0.7, options=(("constants", False),)),
    )
    common: dict[str, Any] = {
        "group_ids": ("g", "g"),
        "inputs": Inputs.of_texts(["x", "y"]),
        "metadata": ({}, {}),
        "sample_weights": torch.tensor([1.0, 0.0]),
        "status": (Status.COMPLETED, Status.PADDING),
        "policy_version": (0, 1),
    }
    packed = torch.arange(5)
    text = Track(
        name="text",
        sample_ids=("t0", "t1"),
        segment=TextSegment(
            prompt_tokens=(packed[:1], packed[:3]),
            tokens=(packed[:2], packed[2:]),
            mask=(torch.tensor([True, False]), packed[2:] > 3),
            options=(("guidance_scale", 5.0),),
        ),
        media=Media(kind="text", values=("", "b")),
        **common,
    )
    image = Track(
        name="image",
        sample_ids=("i0", "i1"),
        parent_track="text",
        parent_ids=("t0", "t1"),
        segment=segment,
        conditions={
            "positive": Conditions(
                values={"e": torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)}, index=torch.tensor([0, 0])
            )
        },
        media=Media(kind="video", values=(torch.rand(1, 3, 2, 2), torch.rand(2, 3, 2, 2)), rate=12.5),
        reward_parts={"shapes": torch.tensor([float("nan"), -0.0])},
        **common,
    )
    return {"text": text, "image": image}


@pytest.mark.parametrize("value", [make_request(), *make_tracks().values()])
def test_what_comes_back_is_the_same_bit_for_bit(value: Any) -> None:
    again = from_bytes(to_bytes(value), type(value))
    assert same(again, value)


def test_types_come_back_as_they_were() -> None:
    again = from_bytes(to_bytes(make_request()), Request)
    assert again.metadata[1] == {"list": [1, (2.5, True)], "inf": -math.inf}
    assert isinstance(again.latent.sampling.sde, SdeStepsConfig)
    track = from_bytes(to_bytes(make_tracks()["image"]), Track)
    assert track.status == (Status.COMPLETED, Status.PADDING)
    assert isinstance(track.status[1], Status)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 2**31))
def test_any_bits_of_any_dtype_survive(dtype: torch.dtype, tail: list[int], seed: int) -> None:
    shape = (2, *tail)
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    if dtype is torch.bool:
        raw = raw % 2
    value = raw.view(dtype).reshape(shape)
    conditions = Conditions(values={"e": value}, index=torch.tensor([1, 0]))
    again = from_bytes(to_bytes(conditions), Conditions)
    assert same(again.values["e"], value)


def test_a_piece_of_a_batch_ships_its_own_rows_alone() -> None:
    segment = TextSegment(
        prompt_tokens=(torch.ones(1, dtype=torch.int64),) * 100,
        tokens=tuple(torch.zeros(1000, dtype=torch.int64) for _ in range(100)),
    )
    # 8 bytes a token; the rest is the header.
    assert len(to_bytes(segment.chunks(1)[0])) < 8 * 1000 + 1000
    latents = make_tracks()["image"].select([0])
    wide = dataclasses.replace(latents.latent, latents=torch.zeros(100, 2, 1000)[:1])
    assert len(to_bytes(wide)) < 4 * 2 * 1000 + 2000


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (Path("/x"), r"Track.metadata\[0\]\['bad'\]: a pathlib.PosixPath was given"),
        (torch.float32, r"Track.metadata\[0\]\['bad'\]: a torch.dtype"),
        ({1, 2}, "a builtins.set was given"),
        (torch.zeros(2).to_sparse(), "layout torch.sparse_coo"),
    ],
)
def test_other_types_are_refused_by_name(bad: object, says: str) -> None:
    track = make_tracks()["text"]
    with pytest.raises(BatchError, match=says):
        to_bytes(dataclasses.replace(track, metadata=({"bad": bad}, {})))


def test_a_class_that_only_has_the_name_of_a_track_type_is_refused() -> None:
    @dataclasses.dataclass
    class MediaRef:
        uri: str

    track = make_tracks()["text"]
    with pytest.raises(BatchError, match="MediaRef was given"):
        to_bytes(dataclasses.replace(track, metadata=({"bad": MediaRef(uri="x")}, {})))


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_bytes_that_were_cut_off_are_refused(cut: int) -> None:
    data = to_bytes(make_request())
    with pytest.raises(BatchError, match="that were cut off"):
        from_bytes(data[:cut], Request)


def test_bytes_of_something_else_are_refused() -> None:
    from safetensors.torch import save

    with pytest.raises(BatchError, match="that no `to_bytes` wrote"):
        from_bytes(save({"x": torch.zeros(1)}), Request)
    with pytest.raises(BatchError, match="that no `to_bytes` wrote"):
        from_bytes(b"\x80\x04\x95" + b"0" * 40, Request)


def test_bytes_of_another_type_are_refused() -> None:
    with pytest.raises(BatchError, match="got the bytes of a Track, expected a Request"):
        from_bytes(to_bytes(make_tracks()["text"]), Request)


def test_another_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serial, "FORMAT", 2)
    data = to_bytes(make_request())
    monkeypatch.undo()
    with pytest.raises(BatchError, match="format 2 was found; this version of unirl-core reads format 1"):
        from_bytes(data, Request)


def test_types_and_fields_of_a_later_release_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Later(Sampler):
        beta: float = 0.0

    segment = dataclasses.replace(make_tracks()["image"].latent, sampler=Later(kernel="cps", eta=0.7))
    monkeypatch.setitem(serial.DATACLASSES, "Later", Later)
    unknown_type = to_bytes(segment)
    monkeypatch.undo()
    with pytest.raises(BatchError, match="type 'Later' is unknown here"):
        from_bytes(unknown_type, LatentSegment)
    Later.__name__ = "Sampler"
    monkeypatch.setitem(serial.DATACLASSES, "Sampler", Later)
    unknown_field = to_bytes(segment)
    monkeypatch.undo()
    with pytest.raises(BatchError, match="Sampler has no field 'beta' here"):
        from_bytes(unknown_field, LatentSegment)
