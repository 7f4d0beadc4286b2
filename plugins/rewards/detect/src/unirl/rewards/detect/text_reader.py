"""Reading the text in images, in this process or in several. Imports no torch: each of those processes imports it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from PIL import Image
from unirl.core.errors import RewardFailed

if TYPE_CHECKING:
    from rapidocr.utils.output import RapidOCROutput

__all__ = ["ReaderSettings", "Readers", "TextReader"]


@dataclass(frozen=True, kw_only=True)
class ReaderSettings:
    """As in `OcrConfig`."""

    min_confidence: float
    min_side_px: int
    threads: int


class TextReader:
    """PP-OCRv6 (small) as RapidOCR ships it, on ONNX Runtime. Nothing is fetched: the models are in its wheel."""

    def __init__(self, settings: ReaderSettings) -> None:
        import rapidocr

        models = Path(rapidocr.__file__).parent / "models"
        self._engine = rapidocr.RapidOCR(
            params={
                # Its own log writes a line about each image without text.
                "Global.log_level": "critical",
                "Global.text_score": settings.min_confidence,
                # Upside-down text is not what the prompt asks for.
                "Global.use_cls": False,
                # A path, because RapidOCR downloads a model that it knows by name and does not find.
                "Det.model_path": str(models / "PP-OCRv6_det_small.onnx"),
                "Det.limit_side_len": settings.min_side_px,
                "Rec.model_path": str(models / "PP-OCRv6_rec_small.onnx"),
                "EngineConfig.onnxruntime.intra_op_num_threads": settings.threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )

    def read(self, image: Image.Image) -> str:
        """All text in an RGB image, line by line from top to bottom."""
        # RapidOCR takes arrays as OpenCV has them: blue, green, red.
        result = cast("RapidOCROutput", self._engine(np.ascontiguousarray(np.asarray(image)[:, :, ::-1])))
        return "\n".join(result.txts or ())


class Readers:
    """Reads in `processes` processes, started at the first image; one is this process."""

    def __init__(self, settings: ReaderSettings, *, processes: int, key: str) -> None:
        """key: of the reward, for errors. Raises ModuleNotFoundError, with the extra to install, without RapidOCR."""
        try:
            import onnxruntime  # noqa: F401 - RapidOCR imports it late
            import rapidocr  # noqa: F401
        except ModuleNotFoundError as error:
            error.add_note("The reward `ocr` needs more packages: pip install 'unirl-reward-detect[ocr]'")
            raise
        self._settings, self._processes, self._key = settings, processes, key
        self._here = TextReader(settings) if processes == 1 else None
        self._pool: ProcessPoolExecutor | None = None

    def read(self, images: Sequence[Image.Image]) -> list[str]:
        """The text of each image, in their order. What a reader raises is raised here.

        Raises RewardFailed where one of the processes ends; the next call starts others.
        """
        if self._here is not None:
            return [self._here.read(image) for image in images]
        if self._pool is None:
            # A fork of a process that has threads may hang.
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._processes, spawn, initializer=_begin, initargs=(self._settings,))
        try:
            return list(self._pool.map(_read, images))
        except BrokenProcessPool as error:
            self.close()
            raise RewardFailed(
                f"{self._key}: a process that reads images ended. It may have had too little memory: lower "
                f"{self._key}.processes. If a script of yours starts the run, start it under "
                '`if __name__ == "__main__":`, because each process imports the script.'
            ) from error

    def close(self) -> None:
        """End the processes. May be called twice."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)


_reader: TextReader | None = None
"""Of a process of the pool."""


def _begin(settings: ReaderSettings) -> None:
    """Start of a process of the pool."""
    global _reader
    # Ctrl-C ends the run in order, and that ends the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _reader = TextReader(settings)


def _end_with_parent() -> None:
    """A process of the pool waits for work forever, also when its parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _read(image: Image.Image) -> str:
    assert _reader is not None
    return _reader.read(image)
