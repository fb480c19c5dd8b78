"""Check for settings that Whisper models do not support."""

from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.models.loader import read_config
from penstock_enginecore.models.multimodal.speech import SpeechCheckpoint


def check_speech(config: EngineCoreConfig, task: str) -> None:
    """Raise ConfigError, with the setting and a remedy, if the checkpoint is a Whisper model and a setting does not
    work with it. Raises ModelLoadError if the checkpoint cannot be served. This check runs before the model is loaded.
    """
    checkpoint = SpeechCheckpoint.of(read_config(config.model), with_towers=config.multimodal.enabled)
    if checkpoint is None:
        return
    model, executor, positions = config.model, config.executor, checkpoint.sound_positions
    block_size, longest, least = config.cache.block_size, model.max_model_len, positions + 2
    refused = {
        f"model.task is {task!r}": (task != "generate", "'generate'"),
        f"model.quantization is {model.quantization!r}": (model.quantization == "fp8", "'auto'"),
        f"model.max_model_len is {longest}, and {positions} positions of each prompt stand for the sound": (
            longest is not None and longest < least,
            f"at least {least}",
        ),
        f"executor.tensor_parallel_size is {executor.tensor_parallel_size}": (executor.tensor_parallel_size > 1, "1"),
        f"executor.pipeline_parallel_size is {executor.pipeline_parallel_size}": (
            executor.pipeline_parallel_size > 1,
            "1",
        ),
        "expert_parallel.enabled is true": (config.expert_parallel.enabled, "false"),
        f"speculative.method is {config.speculative.method!r}": (config.speculative.enabled, "''"),
        f"lora.max_loras is {config.lora.max_loras}": (config.lora.enabled, "0"),
        f"cache.dtype is {config.cache.dtype!r}": (config.cache.dtype == "fp8", "'auto'"),
        f"cache.block_size is {block_size}, which does not divide the {positions} positions of a sound": (
            positions % block_size > 0,
            "16 or 32",
        ),
    }
    for setting, (conflicts, remedy) in refused.items():
        if conflicts:
            raise ConfigError(f"{setting}, but Whisper models do not support this; set it to {remedy}")
