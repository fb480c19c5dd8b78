"""Creation of the configured drafter."""

from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.forward.base import ForwardPass
from penstock_enginecore.forward.build import ForwardConfig
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.speculation.base import Drafter
from penstock_enginecore.speculation.draft_model import load_draft_model
from penstock_enginecore.speculation.eagle import load_eagle
from penstock_enginecore.speculation.mtp import load_mtp
from penstock_enginecore.speculation.ngram import Ngram
from penstock_enginecore.speculation.prediction import Predicted
from penstock_enginecore.speculation.suffix import Suffix


def create_drafter(
    config: EngineCoreConfig, model: LoadedModel, target: ForwardPass, forward: ForwardConfig, progress: Progress
) -> Drafter | None:
    """Create the configured drafter, or return None if speculative decoding is off.

    Args:
        config: Config of the engine.
        model: The model that verifies.
        forward: Config of the drafter's forward pass.
        progress: Function that gets progress messages.
        target: The forward pass of ``model``.

    Raises:
        ModelLoadError: The draft model or head does not fit ``model``, or the checkpoint has no multi-token-prediction
            layer.
    """
    speculative = config.speculative
    match speculative.method:
        case "":
            return None
        case "prediction":
            return Predicted(None)
        case "ngram":
            return Predicted(Ngram(speculative.prompt_lookup_min, speculative.prompt_lookup_max))
        case "suffix":
            return Predicted(
                Suffix(
                    max_depth=speculative.suffix_decoding_max_tree_depth,
                    max_factor=speculative.suffix_decoding_max_spec_factor,
                    min_probability=speculative.suffix_decoding_min_token_prob,
                    max_bytes=speculative.suffix_decoding_cache_bytes,
                )
            )
        case "draft_model":
            return Predicted(load_draft_model(config, model, forward, progress))
        case "eagle" | "eagle3":
            return Predicted(load_eagle(config, model, target, forward, progress))
        case "mtp":
            return Predicted(load_mtp(config, model, target, forward, progress))
