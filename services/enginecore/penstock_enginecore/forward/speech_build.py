"""Construction of the forward pass of Whisper's decoder."""

import itertools
from functools import partial

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionBackend
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.forward.build import BuiltForward, ForwardConfig, finish_forward, open_backends
from penstock_enginecore.forward.cuda.attention import Attending, attention_candidates
from penstock_enginecore.forward.dummy_inputs import Probe, throwaway
from penstock_enginecore.forward.equivalence_check import first_proven
from penstock_enginecore.forward.native import linear_candidate
from penstock_enginecore.forward.speech import SpeechForward
from penstock_enginecore.models.loader import LoadedModel

_NUM_TEXT = 8
"""Number of tokens of text in the probe, a test prompt with a sound."""
_CUTS = (-500, 3, 4)
"""Positions at which the probe is cut into steps, counted from the first token of text."""


@torch.inference_mode()
def build_speech_forward(model: LoadedModel, config: ForwardConfig) -> BuiltForward:
    """Build the forward pass and sampler of a Whisper model. Raises the errors of ``build_forward``."""
    native, attends, backend = open_backends(config)

    def attended(attends: AttentionBackend, packed_bytes: int = 0) -> SpeechForward:
        return SpeechForward(model, config.device, config.block_size, attends, packed_bytes)

    reference = attended(create_backend("reference", config.device))
    run_parts = partial(_probe_text, model)
    run, serve = partial(run_parts, reference), partial(attended, backend)
    attending = Attending(config.device, reference.specs, model.dtype, attended, run_parts)
    candidates = attention_candidates(attending, config.kernels, config.attention_backend)
    if native is not None and native.uses.linear:
        candidates.append(linear_candidate(native.library, model.module, run, serve))
    return finish_forward(model, config, native, attends, first_proven(candidates, run, config.agree), serve)


def _probe_text(model: LoadedModel, forward: SpeechForward) -> torch.Tensor:
    """Return the logits of the probe's tokens of text, computed in several steps. The probe's sound has embeddings of
    tokens in place of the encoder's outputs. Afterwards ``forward`` has no KV cache.
    """
    positions = model.sound_positions
    probe = Probe.alone(np.arange(1, positions + _NUM_TEXT + 1) * 7919 % model.vocab_size)
    cuts = [positions + cut for cut in _CUTS if positions + cut > 0]
    logits = []
    with throwaway(forward, probe.metadata.block_size, probe.num_blocks, 1):
        for start, end in itertools.pairwise([0, *cuts, len(probe.token_ids)]):
            rows = np.arange(max(start, positions), end) - start
            logits.append(forward.run(probe.batch(forward, start, end), rows).logits.clone())
    return torch.cat(logits)
