"""Source images on their way to an engine: read once as training reads them, echoed by what was encoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from unirl.core.errors import DataError, RunFailed
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs, Turn
from unirl.engine_host.received_media import PIXELS, echoed, read_media, read_turns
from unirl.engine_host.sent_media import sent_media
from unirl.numerics.media import LoadedImage, load_image, load_picture

Picture = Callable[..., MediaRef]


@pytest.fixture
def picture(tmp_path: Path) -> Picture:
    """Writes a random image [H, W, 3] of 8 bits, or [H, W] of 16."""

    def write(name: str, *size: int, seed: int = 0, dtype: type = np.uint8) -> MediaRef:
        pixels = np.random.Generator(np.random.Philox(key=seed)).integers(0, np.iinfo(dtype).max, size, dtype=dtype)
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
        return MediaRef(modality="image", role="source", uri=str(tmp_path / f"{name}.png"))

    return write


def inputs_of(*media: tuple[MediaRef, ...]) -> Inputs:
    ids = tuple(f"p{number}" for number in range(len(media)))
    return Inputs(ids=ids, prompts=ids, texts=ids, media=media)


def test_every_image_comes_out_as_training_reads_it(picture: Picture, tmp_path: Path) -> None:
    """In 8 and 16 bits, and from memory; none, one and several for a prompt, in their order; roles are kept."""
    small, deep = picture("small", 4, 6, 3), picture("deep", 5, 3, dtype=np.uint16)
    held = LoadedImage.of(torch.rand(3, 2, 2, generator=torch.Generator().manual_seed(0)), role="first_frame")
    inputs = inputs_of((), (small,), (deep, held, small))
    with sent_media(inputs, folder=str(tmp_path)) as sent:
        received = [read_media(media) for media in sent.inputs.media]
        hashes = sent.of(sent.inputs)
    assert (sent.inputs.ids, sent.inputs.texts) == (inputs.ids, inputs.texts)
    for expected, result in zip(inputs.media, received, strict=True):
        assert [ref.role for ref in result] == [ref.role for ref in expected]
        for one, other in zip(expected, result, strict=True):
            assert torch.equal(load_image(other), load_image(one))
            assert load_picture(other).tobytes() == load_picture(one).tobytes()
    assert hashes == [[ref.uri for ref in media] for media in received]
    # Of fp32 pixels, whatever they were sent as.
    assert hashes[1] == [LoadedImage.of(load_image(small), role="").uri]


def test_equal_pixels_are_sent_once_and_are_gone_afterwards(picture: Picture, tmp_path: Path) -> None:
    one, other = picture("one", 8, 8, 3), picture("copy", 8, 8, 3)
    folder = tmp_path / "transfers"
    folder.mkdir()
    with sent_media(inputs_of((one,), (other,), (one, other)), folder=str(folder)) as sent:
        (file,) = folder.rglob("*.safetensors")
        assert load_file(file)[PIXELS].dtype == torch.uint8
        assert {ref.uri for media in sent.inputs.media for ref in media} == {str(file)}
    assert not list(folder.iterdir())


def test_prompts_without_media_write_nothing(tmp_path: Path) -> None:
    inputs = Inputs.of_texts(["a", "b"])
    with sent_media(inputs, folder=str(tmp_path / "none")) as sent:
        assert sent.inputs is inputs
        assert sent.of(inputs) == [[], []]


def test_a_picture_that_is_another_one_when_it_is_read_has_another_hash(picture: Picture, tmp_path: Path) -> None:
    """By one level of one channel, by its shape alone, or swapped with another prompt's."""
    one, other = picture("one", 4, 6, 3, seed=1), picture("other", 4, 6, 3, seed=2)
    with sent_media(inputs_of((one,), (other,)), folder=str(tmp_path)) as sent:
        (first,), (second,) = sent.inputs.media
        (expected,), _ = sent.of(sent.inputs)
        pixels = load_file(first.uri)[PIXELS]
        changed = pixels.clone()
        changed[0, 0, 0] ^= 1
        for wrong in (changed, pixels.reshape(3, 6, 4), pixels.float() / 256):
            save_file({PIXELS: wrong.contiguous()}, tmp_path / "wrong.safetensors")
            (result,) = read_media([MediaRef(modality="image", role="source", uri=str(tmp_path / "wrong.safetensors"))])
            assert result.uri != expected
        assert [ref.uri for ref in read_media([second])] != [expected]
        assert [ref.uri for ref in read_media([first])] == [expected]


def test_media_that_cannot_be_sent_are_refused(picture: Picture, tmp_path: Path) -> None:
    good = picture("good", 4, 4, 3)
    missing = MediaRef(modality="image", role="source", uri=str(tmp_path / "gone.png"))
    film = MediaRef(modality="video", role="source", uri=good.uri)
    for bad, message in ((missing, r"gone\.png' \(source\): it cannot be opened"), (film, "modality 'video'")):
        with pytest.raises(DataError, match=message), sent_media(inputs_of((good,), (bad,)), folder=str(tmp_path)):
            pytest.fail("it was sent")
    with (
        pytest.raises(RunFailed, match=r"engine\.transfer_dir: no space for 0 MiB of media in .*nowhere"),
        sent_media(inputs_of((good,)), folder=str(tmp_path / "nowhere")),
    ):
        pytest.fail("it was sent")
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_turns_are_sent_with_their_images_and_any_change_of_one_changes_its_echo(
    picture: Picture, tmp_path: Path
) -> None:
    cat, dog = picture("cat", 4, 6, 3), picture("dog", 4, 6, 3, seed=1)
    turn = Turn(stage="plan", text="a cat", tokens=(3, 5), media=(cat,))
    others = (
        dataclasses.replace(turn, stage="draft"),
        dataclasses.replace(turn, text="a dog"),
        dataclasses.replace(turn, tokens=(3,)),
        dataclasses.replace(turn, media=(dog,)),
        dataclasses.replace(turn, media=()),
    )
    each = ((), (turn,), *((other,) for other in others), (turn, others[1]))
    inputs = dataclasses.replace(inputs_of(*((dog,),) * len(each)), turns=each)
    with sent_media(inputs, folder=str(tmp_path)) as sent:
        assert sent.inputs.turns is not None
        received = [read_turns(own) for own in sent.inputs.turns]
        media = [read_media(own) for own in sent.inputs.media]
        hashes = sent.of(sent.inputs)
    assert hashes == [echoed(own, turns) for own, turns in zip(media, received, strict=True)]
    assert len({tuple(own) for own in hashes}) == len(each)
    assert hashes[-1] == [*hashes[1], *hashes[3][1:]]
    ((one,), expected) = received[1], load_image(cat)
    assert (one.stage, one.text, one.tokens) == (turn.stage, turn.text, turn.tokens)
    assert torch.equal(load_image(one.media[0]), expected)
