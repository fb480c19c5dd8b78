"""Check, before any process starts, that a model on the Hugging Face hub can be loaded."""

import os

from penstock_common.errors import ConfigError

TIMEOUT = 5.0
"""Timeout of a request to the hub, in seconds."""
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def check_hub(model: str, revision: str = "") -> None:
    """Raise ConfigError if a model is neither in this machine's cache nor available from the hub.

    The message states the remedy. A model in the cache is served without a request to the hub, so no network is needed.
    """
    # Imported here because it takes half a second and only hub ids need it.
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        if isinstance(try_to_load_from_cache(model, "config.json", revision=revision or None), str):
            return
        if offline := next((name for name in _OFFLINE if os.environ.get(name, "") not in ("", "0")), None):
            raise ConfigError(
                f"model {model}: the model is not in this machine's cache, and {offline} is set; give the directory of a "
                "checkpoint, or download it first"
            )
        HfApi().model_info(model, revision=revision or None, timeout=TIMEOUT)
    except ConfigError:
        raise
    except HFValidationError as e:
        raise ConfigError(f"model {model}: this directory does not exist, and the text is not a hub id: {e}") from None
    except GatedRepoError:
        raise ConfigError(
            f"model {model}: this model is gated: accept the terms on the hub, and set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise ConfigError(f"model {model}: the hub has no revision {revision!r} of this model") from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"model {model}: there is no such directory, and the hub has no public model of this name; set HF_TOKEN if the "
            "model is private"
        ) from None
    except Exception as e:  # The hub's HTTP library raises various errors if there is no network.
        raise ConfigError(
            f"model {model}: there is no such directory, the model is not in this machine's cache, and the hub cannot be reached "
            f"({str(e).strip() or type(e).__name__}); give the directory of a checkpoint"
        ) from None
