"""Checks, before anything starts, that a model of the Hugging Face hub can be loaded."""

import os

from penstock_common.errors import ConfigError

# Checks, before anything starts, that a model of the Hugging Face hub can be loaded.

TIMEOUT = 5.0
"""Seconds that the hub has to answer."""
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def check_hub(model: str, revision: str = "") -> None:
    """Raise ConfigError, which says what to do, when a model is neither in this machine's cache nor available from the hub.

    The hub is not asked for a model that is in the cache: such a model is served without a network.
    """
    # Imported here: it takes half a second, and is needed for hub ids alone.
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        if isinstance(try_to_load_from_cache(model, "config.json", revision=revision or None), str):
            return
        if offline := next((name for name in _OFFLINE if os.environ.get(name, "") not in ("", "0")), None):
            raise ConfigError(
                f"model {model}: it is not in this machine's cache, and {offline} is set; "
                "give the directory of a checkpoint, or download it first"
            )
        HfApi().model_info(model, revision=revision or None, timeout=TIMEOUT)
    except ConfigError:
        raise
    except HFValidationError as e:
        raise ConfigError(f"model {model}: no such directory, and no id of the hub: {e}") from None
    except GatedRepoError:
        raise ConfigError(
            f"model {model}: its owner asks for consent: accept the terms on the hub, and set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise ConfigError(f"model {model}: the hub has no revision {revision!r} of it") from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"model {model}: no such directory, and the hub has no such model, or a private one: set HF_TOKEN for that"
        ) from None
    except Exception as e:  # whatever its HTTP library raises without a network
        raise ConfigError(
            f"model {model}: no such directory, it is not in this machine's cache, and the hub cannot be reached "
            f"({str(e).strip() or type(e).__name__}); give the directory of a checkpoint"
        ) from None
