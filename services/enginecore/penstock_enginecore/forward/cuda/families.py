"""What the fused decoder computes for a model: a plan of its layers, by its family."""

from typing import Any

from penstock_enginecore.forward.cuda.family import FAMILIES
from penstock_enginecore.forward.cuda.latent_reader import LatentReader
from penstock_enginecore.forward.cuda.plans import ModelPlan
from penstock_enginecore.forward.cuda.reader import Reader
from penstock_enginecore.forward.modules import ProbedModel
from penstock_enginecore.forward.proof import UnsuitableError


def plan_model(probed: ProbedModel) -> ModelPlan:
    """The plan of a loaded model. UnsuitableError with the name of what is not known of it."""
    module: Any = probed.model.module
    family = FAMILIES.get(type(module).__name__)
    if family is None:
        raise UnsuitableError(f"{type(module).__name__} is not one of {', '.join(sorted(FAMILIES))}")
    reader = LatentReader if family.latent else Reader
    return reader(family, module).model(probed.calls)
