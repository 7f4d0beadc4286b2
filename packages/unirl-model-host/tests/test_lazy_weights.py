"""Modules without values, and their values in safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from unirl.core.errors import RecipeError
from unirl.model_host import lazy_weights
from unirl.model_host.lazy_weights import CheckpointValues, Piece, empty_parameters, weight_files


class Net(nn.Module):
    """A tied pair, a table that is in no checkpoint, and one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.leave.weight = self.enter.weight
        self.middle = nn.Linear(3, 3)
        self.register_buffer("rates", 10.0 ** -torch.arange(3.0, dtype=torch.float32), persistent=False)
        self.register_buffer("table", torch.arange(4.0, dtype=torch.float32))


VALUES = {
    "enter.weight": torch.arange(15.0).view(5, 3) / 7,
    "middle.weight": torch.arange(9.0).view(3, 3) / 11,
    "middle.bias": torch.ones(3) / 3,
    "table": torch.arange(4.0) + 1 / 3,
}


def empty(dtype: torch.dtype = torch.float32) -> Net:
    with empty_parameters(dtype):
        return Net()


def stored(folder: Path, values: dict[str, torch.Tensor] = VALUES) -> list[Path]:
    save_file(values, folder / "model.safetensors")
    return weight_files(folder, "model")


def test_parameters_have_no_values_and_buffers_have_theirs() -> None:
    net = empty(torch.bfloat16)
    assert all(param.is_meta and param.dtype is torch.bfloat16 for param in net.parameters())
    assert net.leave.weight is net.enter.weight and len(list(net.parameters())) == 3
    assert torch.equal(net.get_buffer("rates"), Net().get_buffer("rates"))
    # Outside of the block modules are as ever.
    assert not nn.Linear(1, 1).weight.is_meta and torch.get_default_dtype() is torch.float32


def test_values_are_rounded_to_the_dtype_of_the_module_and_then_to_that_of_the_tensor(tmp_path: Path) -> None:
    values = CheckpointValues(empty(torch.bfloat16), stored(tmp_path))
    tensors = {name: torch.zeros_like(value) for name, value in VALUES.items()}
    values.fill(tensors)
    for name in ("enter.weight", "middle.weight", "middle.bias"):
        assert torch.equal(tensors[name], VALUES[name].bfloat16().float()), name
    # The buffer was made in float32, whatever the parameters are.
    assert torch.equal(tensors["table"], VALUES["table"])


def test_a_tied_weight_may_be_stored_under_either_name_or_both(tmp_path: Path) -> None:
    weight = VALUES["enter.weight"]
    rest = {name: value for name, value in VALUES.items() if name != "enter.weight"}
    for number, names in enumerate((["enter.weight"], ["leave.weight"], ["enter.weight", "leave.weight"])):
        folder = tmp_path / str(number)
        folder.mkdir()
        values = CheckpointValues(empty(), stored(folder, {**rest, **{name: weight.clone() for name in names}}))
        for asked in ("enter.weight", "leave.weight"):
            result = torch.zeros(5, 3)
            values.fill({asked: result})
            assert torch.equal(result, weight)
        (folder / "again").mkdir()
        values.save(folder / "again", {**{name: -value for name, value in VALUES.items()}, "leave.weight": -weight})
        written = load_file(folder / "again" / "model.safetensors")
        assert {name for name in written if name not in rest} == {*names}
        assert all(torch.equal(written[name], -weight) for name in names)


def test_pieces_are_put_together(tmp_path: Path) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.joined = nn.Parameter(torch.empty(2, 4, 3))

    parts = {f"{expert}.{side}": torch.randn(2, 3) for expert in range(2) for side in ("gate", "up")}

    def pieces(name: str, shape: tuple[int, ...]) -> list[Piece]:
        return [
            Piece(name=f"{expert}.{side}", start=(expert, 2 * number, 0), size=(1, 2, 3))
            for expert in range(2)
            for number, side in enumerate(("gate", "up"))
        ]

    with empty_parameters(torch.float32):
        module = Experts()
    result = torch.zeros(2, 4, 3)
    CheckpointValues(module, stored(tmp_path, parts), pieces=pieces).fill({"joined": result})
    expected = torch.stack([torch.cat([parts[f"{expert}.gate"], parts[f"{expert}.up"]]) for expert in range(2)])
    assert torch.equal(result, expected)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"middle.bias": None, "table": None}, r"lack 'middle\.bias' and 1 more\. Fetch the whole checkpoint"),
        ({"enter.weight": None}, r"lack 'enter\.weight'\. Fetch"),
        ({"extra": torch.zeros(1)}, r"have 'extra', which Net with the settings of config\.json does not have"),
        ({"middle.bias": torch.zeros(4)}, r"have 'middle\.bias' as \[4\], expected \[3\] by config\.json"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_clear_error(tmp_path: Path, changed, says: str) -> None:
    values = {name: value for name, value in {**VALUES, **changed}.items() if value is not None}
    with pytest.raises(RecipeError, match=rf"model\.path: the weights in .* {says}"):
        CheckpointValues(empty(), stored(tmp_path, values))


def test_a_damaged_file_and_absent_ones_are_told(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"has neither model\.fp16\.safetensors nor model\.safetensors\.index\.fp16"):
        weight_files(tmp_path, "model", variant="fp16")
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(RecipeError, match=r"model\.safetensors' cannot be read: .* Fetch it again"):
        CheckpointValues(empty(), weight_files(tmp_path, "model"))


def test_the_index_names_the_files(tmp_path: Path) -> None:
    names = {name: f"{number % 2}.safetensors" for number, name in enumerate(VALUES)}
    for file in set(names.values()):
        save_file({name: VALUES[name] for name in VALUES if names[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert weight_files(tmp_path, "model") == [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    result = {name: torch.zeros_like(value) for name, value in VALUES.items()}
    CheckpointValues(empty(), weight_files(tmp_path, "model")).fill(result)
    assert all(torch.equal(result[name], value) for name, value in VALUES.items())


class Swapped(nn.Module):
    """Two matrices joined, each stored with its halves the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = nn.Parameter(torch.empty(2, 4, 3))


def halves(name: str, shape: tuple[int, ...]) -> list[Piece]:
    return [
        Piece(name=f"{row}.stored", start=(row, here, 0), size=(1, 2, 3), source=(2 - here, 0))
        for row in range(2)
        for here in (0, 2)
    ]


STORED = {f"{row}.stored": torch.arange(12.0).view(4, 3) + 100 * row for row in range(2)}


def swapped(folder: Path, values: dict[str, torch.Tensor] = STORED) -> CheckpointValues:
    with empty_parameters(torch.float32):
        module = Swapped()
    return CheckpointValues(module, stored(folder, values), pieces=halves)


def test_pieces_may_be_parts_of_stored_tensors_and_are_written_back(tmp_path: Path) -> None:
    values = swapped(tmp_path)
    result = torch.zeros(2, 4, 3)
    values.fill({"joined": result})
    assert torch.equal(result, torch.stack([torch.cat([one[2:], one[:2]]) for one in STORED.values()]))
    (tmp_path / "again").mkdir()
    values.save(tmp_path / "again", {"joined": -result})
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == STORED.keys()
    assert all(torch.equal(written[name], -value) for name, value in STORED.items())


def test_a_shard_reads_the_parts_that_lie_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second matrix, rows 1 to 2: one row of each half."""
    monkeypatch.setattr(lazy_weights, "_local", lambda tensor: (tensor, (1, 1, 0)))
    shard = torch.zeros(1, 2, 3)
    swapped(tmp_path).fill({"joined": shard})
    assert torch.equal(shard[0], STORED["1.stored"][[3, 0]])


def test_a_stored_tensor_whose_parts_do_not_cover_it_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"have '1\.stored' as \[5, 3\], expected \[4, 3\] by config\.json"):
        swapped(tmp_path, {**STORED, "1.stored": torch.zeros(5, 3)})


def test_tensors_of_other_modules_and_the_index_are_written_as_they_were(tmp_path: Path) -> None:
    """Of two files, one of which has a tensor that the module does not know."""

    class Half(nn.Module):
        _keys_to_ignore_on_load_unexpected = ("^other",)

        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(2, 2, bias=False)

    values = {"own.weight": torch.rand(2, 2), "other.weight": torch.rand(3).half()}
    for number, (name, value) in enumerate(values.items()):
        save_file({name: value}, tmp_path / f"{number}.safetensors")
    index = {"weight_map": {name: f"{number}.safetensors" for number, name in enumerate(values)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "again").mkdir()
    half = Half()
    CheckpointValues(half, weight_files(tmp_path, "model")).save(tmp_path / "again", half.state_dict())
    files = weight_files(tmp_path / "again", "model")
    written = {name: value for file in files for name, value in load_file(file).items()}
    assert torch.equal(written["own.weight"], half.own.weight)
    assert torch.equal(written["other.weight"], values["other.weight"]) and written["other.weight"].dtype is torch.half
