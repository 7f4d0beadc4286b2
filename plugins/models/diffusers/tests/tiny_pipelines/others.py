"""Pipelines of diffusers from prompts, with a transformer, that the tests do not run; by the reason."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["OTHERS"]

OTHERS: Mapping[str, tuple[str, ...]] = {
    "need a mask, a video, a pose or controls": (
        "ChromaInpaintPipeline", "CogView4ControlPipeline", "Cosmos2_5_TransferPipeline", "EasyAnimateControlPipeline",
        "EasyAnimateInpaintPipeline", "Flux2KleinInpaintPipeline", "FluxControlImg2ImgPipeline",
        "FluxControlInpaintPipeline", "FluxControlNetImg2ImgPipeline", "FluxControlNetInpaintPipeline",
        "FluxControlNetPipeline", "FluxInpaintPipeline", "FluxKontextInpaintPipeline", "LTXConditionPipeline",
        "LucyEditPipeline", "QwenImageControlNetInpaintPipeline", "QwenImageControlNetPipeline",
        "QwenImageEditInpaintPipeline", "QwenImageInpaintPipeline", "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
        "StableDiffusion3ControlNetInpaintingPipeline", "StableDiffusion3ControlNetPipeline",
        "StableDiffusion3InpaintPipeline", "WanAnimatePipeline", "WanVideoToVideoPipeline",
        "ZImageControlNetInpaintPipeline", "ZImageControlNetPipeline", "ZImageInpaintPipeline",
    ),
    "start from an image with noise": (
        "ChromaImg2ImgPipeline", "HunyuanImageRefinerPipeline", "QwenImageImg2ImgPipeline",
        "StableDiffusion3Img2ImgPipeline", "StableDiffusion3PAGImg2ImgPipeline", "ZImageImg2ImgPipeline",
    ),
    "are not of flow matching": (
        "AllegroPipeline", "CogVideoXFunControlPipeline", "CogVideoXImageToVideoPipeline", "CogVideoXPipeline",
        "CogVideoXVideoToVideoPipeline", "CogView3PlusPipeline", "ConsisIDPipeline", "CosmosTextToWorldPipeline",
        "CosmosVideoToWorldPipeline", "HunyuanDiTControlNetPipeline", "HunyuanDiTPAGPipeline", "HunyuanDiTPipeline",
        "LattePipeline", "PixArtAlphaPipeline", "PixArtSigmaPAGPipeline", "PixArtSigmaPipeline",
        "SanaControlNetPipeline", "SanaSprintImg2ImgPipeline", "SanaSprintPipeline",
    ),
    "keep a state from step to step, or guide themselves": ("Flux2KleinKVPipeline", "SanaPAGPipeline"),
    "have no height and width": ("HunyuanVideo15ImageToVideoPipeline", "QwenImageLayeredPipeline"),
    "make sound": (
        "AceStepPipeline", "Kandinsky6TI2VAPipeline", "LTX2ConditionPipeline", "LTX2DFRPipeline",
        "LTX2DFRTemporalRefinePipeline", "LTX2HDRPipeline", "LTX2ImageToVideoPipeline", "LTX2InContextPipeline",
        "LTX2Pipeline", "LongCatAudioDiTPipeline", "StableAudio3AudioToAudioPipeline", "StableAudio3InpaintPipeline",
        "StableAudio3Pipeline", "StableAudioPipeline",
    ),
    "were not tried": (
        "AnyFlowFARPipeline", "AnyFlowPipeline", "BriaFibo2Pipeline", "BriaFiboEditPipeline",
        "Cosmos2TextToImagePipeline", "Cosmos2VideoToWorldPipeline", "Cosmos2_5_PredictBasePipeline",
        "Cosmos3OmniPipeline", "Flux2Pipeline", "GlmImagePipeline", "HeliosPipeline", "HeliosPyramidPipeline",
        "HunyuanImagePipeline", "HunyuanVideoFramepackPipeline", "HunyuanVideoImageToVideoPipeline",
        "Ideogram4Pipeline", "JoyImageEditPipeline", "JoyImageEditPlusPipeline", "Kandinsky5I2IPipeline",
        "Kandinsky5I2VPipeline", "LTXI2VLongMultiPromptPipeline", "MotifVideoImage2VideoPipeline",
        "MotifVideoPipeline", "NucleusMoEImagePipeline", "OmniGenPipeline", "PRXPipeline", "PRXPixelPipeline",
        "SanaImageToVideoPipeline", "SanaWMPipeline", "SkyReelsV2DiffusionForcingImageToVideoPipeline",
        "ZImageOmniPipeline",
    ),
}  # fmt: skip
