"""Runners that execute steps, or one pipeline stage of each step.

A runner prepares the inputs, runs the forward pass, and samples tokens from the logits.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import msgspec
import numpy as np
import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.attention.kv_cache import LayerCaches
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.scheduler.output import DraftTokenIds, GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.worker_stats import GraphStats
from penstock_enginecore.cuda_virtual_memory import KeptMemory
from penstock_enginecore.executor.broken_states import BrokenStates
from penstock_enginecore.executor.device import prompt_batch_tokens, step_tokens
from penstock_enginecore.executor.generation.drafting import Drafting
from penstock_enginecore.executor.generation.graph_capture import GraphCapture, NewestTokens, fastest_pass
from penstock_enginecore.executor.generation.input_batch import InputBatch
from penstock_enginecore.executor.generation.media import StepEmbeddings, row_bytes
from penstock_enginecore.executor.generation.step_inputs import ExpectedTokens, StepInputs
from penstock_enginecore.executor.generation.step_sampling import (
    PendingStep,
    StepSampling,
    read_late,
    score_prompts,
    with_broken,
)
from penstock_enginecore.experts.group_experts import GroupExperts
from penstock_enginecore.forward.base import (
    Choice,
    ForwardBatch,
    KeptWeights,
    StatefulForward,
    state_memory,
)
from penstock_enginecore.forward.build import BuiltForward
from penstock_enginecore.forward.dummy_inputs import Probe, block_size_of, probe_logits
from penstock_enginecore.forward.stage import StageForward
from penstock_enginecore.lora.adapter import AdaptedForward
from penstock_enginecore.media.towers import Towers
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.parallel.stage_links import StageLinks
from penstock_enginecore.parallel.stage_plan import own_groups
from penstock_enginecore.sample.base import DrawSettings, PlainDraws, SamplingInputs
from penstock_enginecore.speculation.base import Drafter, model_layers, num_model_groups
from penstock_enginecore.states.base import StateMetadata
from penstock_enginecore.states.memory import StateLayers, num_bytes
from penstock_enginecore.worker.device_thread import Arrival, BeginCopy, Late, begin_copy

ChosenElsewhere = Callable[[], Arrival | None]
"""Function that starts to receive the tokens of the last executed step, which another worker samples, in the order of
the step's requests.

The function returns None if this worker does not need the tokens.
"""


class GenerationRunner:
    """``ModelRunner`` of a model that generates tokens: a forward pass, a sampler, and the persistent batch of request
    state.

    If the device samples the tokens of a step, the next step reads these tokens on the device. The host receives a copy
    through ``begin_copy``, and does not wait for the copy. If a request has rules that depend on its previous tokens,
    the runner waits for these tokens after it has launched the step's forward pass. If a step has drafts, the runner
    waits for the step's own tokens.
    """

    def __init__(
        self,
        model: LoadedModel,
        built: BuiltForward,
        begin_copy: BeginCopy = begin_copy,
        chosen_elsewhere: ChosenElsewhere | None = None,
        experts: GroupExperts | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """Args:
        model: The loaded model.
        built: The model's forward pass and sampler.
        begin_copy: Function that starts a copy of tokens to the host.
        chosen_elsewhere: Function that starts to receive the tokens of a step if another worker samples them, or None.
        experts: Experts that are distributed among data-parallel ranks, or None.
        drafter: Drafts tokens after each step, or None.
        """
        self._drafting = None if drafter is None else Drafting(drafter)
        if drafter is not None and drafter.state_layers:
            built.forward.keep_hidden(drafter.state_layers)
        self.experts = experts
        self._model = model
        self._forward = built.forward
        self._states = state_memory(built.forward)
        self._towers = Towers(model.encoder)
        self.adapted = built.forward if isinstance(built.forward, AdaptedForward) else None
        self._sampler = built.sampler
        self._launcher = built.launcher
        self._vocabulary = built.vocabulary
        self._sampling = StepSampling(built)
        self._begin_copy = begin_copy
        self._chosen_elsewhere = chosen_elsewhere
        self._newest = NewestTokens(self._forward.device)
        self._coming: deque[tuple[ExpectedTokens, Arrival]] = deque()
        self.computing = built.computing
        self.graph_capture = GraphCapture.of(built, self._newest)
        self._graphs = built.graphs or GraphStats
        self._caches: LayerCaches = {}
        self._state_layers: StateLayers = {}
        self._num_groups = 0
        self._batch: InputBatch | None = None
        self._kv_cache: KVCacheConfig | None = None
        self._embeddings = StepEmbeddings(model.encoder, model.dtype, self._forward.device)
        self._pending: PendingStep | None = None

    @property
    def info(self) -> ModelInfo:
        """Properties of the model. Prompt embeddings must have as many elements as the output of the embedding layer."""
        return ModelInfo(
            max_len=self._model.max_len,
            vocab_size=self._model.vocab_size,
            eos_token_ids=self._model.eos_token_ids,
            hidden_size=self._model.prompt_embed_size,
            dtype=str(self._model.precision).removeprefix("torch."),
            runs_ahead=self._launcher is not None or self._forward.device.type == "cuda",
            step_tokens=step_tokens(self._forward.device, self._model.sound_positions),
            prompt_batch_tokens=prompt_batch_tokens(self._forward.device, self._model.sound_positions),
            media=() if self._model.encoder is None else tuple(self._model.encoder.media),
            embed_bytes=row_bytes(self._model.encoder, self._model.dtype),
            sound_positions=self._model.sound_positions,
            states=None if self._states is None else self._states.needs,
        )

    @property
    def specs(self) -> dict[str, KVCacheSpec]:
        """KV cache specs of the layers of the model and of the drafter. The dtype of the KV cache may differ from the
        model's dtype.
        """
        return {**self._forward.specs, **({} if self._drafting is None else self._drafting.drafter.specs)}

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the weights of the forward pass, of vision and audio encoders, and of the drafter."""
        drafter = 0 if self._drafting is None else self._drafting.drafter.weight_bytes
        return self._forward.weight_bytes + self._towers.weight_bytes + drafter

    @property
    def caches(self) -> LayerCaches:
        """KV cache of the layers of the model and of the drafter."""
        return self._caches if self._drafting is None else self._caches | self._drafting.drafter.caches

    @property
    def graphs(self) -> GraphStats:
        """Statistics of the forward pass's CUDA graphs."""
        return self._graphs()

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self._caches = self._forward.memory.allocate(model_layers(config))
        self._num_groups = num_model_groups(config)
        self._forward.bind(self._caches)
        self._bind_states({} if config.states is None or self._states is None else self._states.allocate(config.states))
        if self._drafting is not None:
            self._drafting.forget(self._batch)
            self._drafting.allocate(config)
        self._batch = self._empty_batch(config)
        self._coming.clear()
        self._kv_cache = config

    def _bind_states(self, layers: StateLayers) -> None:
        """Keep recurrent states in the memory ``layers`` from now on. An empty dictionary means no memory."""
        self._state_layers = layers
        if isinstance(self._forward, StatefulForward):
            self._forward.bind_states(layers)

    @property
    def state_layers(self) -> StateLayers:
        """The allocated memory for the states of recurrent layers."""
        return self._state_layers

    @property
    def state_bytes(self) -> int:
        """Size in bytes of the memory for the states of recurrent layers."""
        return num_bytes(self._state_layers)

    def forget_requests(self) -> None:
        """Forget all requests, but keep the KV cache allocated."""
        self._pending = None
        self._coming.clear()
        self._embeddings.forget()
        if self._drafting is not None:
            self._drafting.forget(self._batch)
        if self._kv_cache is not None:
            self._batch = self._empty_batch(self._kv_cache)

    def keep(self, kept: KeptMemory) -> None:
        """Move the weights into the memory of ``kept``, whose addresses survive sleep. The KV cache will be allocated
        there too.

        Raises RuntimeError if the forward pass cannot move its weights.
        """
        if not isinstance(self._forward, KeptWeights):
            raise RuntimeError(f"{type(self._forward).__name__} cannot move its weights to fixed addresses")
        kept.move_in([*self._forward.weights(), *self._towers.weights()])
        self._forward.memory.place(kept.empty)

    def read(self, model: LoadedModel) -> None:
        """Copy the weights of ``model`` into the memory of the existing weights. ``model`` is the same checkpoint in
        host memory.
        """
        if isinstance(self._forward, KeptWeights):
            self._forward.read(model)
            self._towers.read(Towers(model.encoder))

    def drop_kv_cache(self) -> None:
        self._caches = {}
        self._forward.bind({})
        self._bind_states({})
        if self._drafting is not None:
            self._drafting.forget(self._batch)
            self._drafting.drafter.release()
        self._batch = self._kv_cache = None
        self._coming.clear()
        self._embeddings.forget()

    @torch.inference_mode()
    def recover(self) -> None:
        """Forget every request, and test the device by sampling a token. Raises the error if the test fails."""
        self.forget_requests()
        with nullcontext() if self.experts is None else self.experts.spread.alone():
            self._run_dummy()

    @torch.inference_mode()
    def execute_dummy_batch(self) -> None:
        """Sample a dummy token. If experts are distributed among ranks, instead compute this rank's experts for the
        tokens of other ranks.
        """
        if self.experts is not None:
            self.experts.spread.take_part()
            return
        self._run_dummy()

    @torch.inference_mode()
    def profile(self, num_tokens: int, num_seqs: int) -> None:
        """Run sequences of the model's maximum length with a temporary KV cache, and sample, so that the caller can
        measure the peak memory.

        For models with media, this method runs the sequences while the largest items are being encoded.
        """
        probe = Probe.largest(num_tokens, self._model.max_len, block_size_of(self.specs))
        self._embeddings.profile(lambda: self._probe(probe, np.arange(num_seqs) % num_tokens))

    @torch.inference_mode()
    def step_seconds(self, num_tokens: int, passes: int) -> float:
        """Time forward passes over the first tokens of a request, with the logits of all tokens and a temporary KV
        cache.

        Returns the duration of the fastest pass in seconds.
        """
        alone = nullcontext() if self.experts is None else self.experts.spread.alone()
        try:
            with alone:
                return fastest_pass(self._forward, num_tokens, passes, warm_up=self._forward.device.type == "cuda")
        finally:
            self._forward.bind(self._caches)
            self._bind_states(self._state_layers)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> None:
        """Run a forward pass over the scheduled tokens, and store the logits for ``sample``.

        Raises RuntimeError if no KV cache is allocated.
        """
        if self._batch is None:
            raise RuntimeError("initialize_kv_cache must be called before the first step")
        if self._drafting is not None:
            self._drafting.update(step, self._batch)
        self._batch.update(step)
        self._embeddings.update(step)
        if not step.num_scheduled_tokens:
            self._pending = None
            return
        began = time.perf_counter()
        inputs = self._prepare(self._batch, step)
        now = inputs.drafts is not None or bool(step.num_drafts_wanted)
        sampling_ids = inputs.sampling_ids
        draws = None if now or self._launcher is None else self._batch.draws(sampling_ids)
        choice = None if draws is None else self._choice(self._batch, draws, sampling_ids)
        fed = None if self._chosen_elsewhere else self._newest.feed(inputs.unknown, inputs.unknown_rows)
        if self.experts is not None:
            self.experts.spread.begin_step(len(inputs.token_ids))
        own = inputs.attention[: self._num_groups]
        states = self._step_states(inputs, step)
        batch = ForwardBatch(inputs.token_ids, inputs.positions, own, None, fed, choice, inputs.segments, states=states)
        batch = self._embeddings.into(batch, inputs, self._forward)
        targets = self._batch.prompt_targets(inputs)
        if targets and self._chosen_elsewhere is None:
            output, prompt_logprobs = score_prompts(self._forward, batch, inputs.logits_indices, targets)
        else:
            with nullcontext() if self._vocabulary is None else self._vocabulary.apart():
                output, prompt_logprobs = self._forward.run(batch, inputs.logits_indices), {}
        if self._drafting is not None:
            self._drafting.observe(inputs, self._batch, output.hidden)
        wanted = step.num_drafts_wanted
        seconds = time.perf_counter() - began
        self._pending = PendingStep(
            inputs,
            output.logits,
            prompt_logprobs,
            draws,
            output.launched,
            wanted,
            seconds,
            broken=BrokenStates.of(inputs.request_ids, states, self._begin_copy),
        )

    def _step_states(self, inputs: StepInputs, step: SchedulerOutput) -> StateMetadata | None:
        """Return the indices of the recurrent states of a step's requests, or None for a model without recurrent
        layers.
        """
        if self._states is None:
            return None
        starts = inputs.attention[0].query_start_loc
        return StateMetadata.of(inputs.request_ids, starts, inputs.positions[starts[:-1]], step.states)

    @torch.inference_mode()
    def sample(self, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput | Late[ModelRunnerOutput]:
        """Sample and return the tokens of the step that ``execute`` ran."""
        pending, self._pending = self._pending, None
        failures = self._embeddings.take_failures()
        if pending is None or self._batch is None:
            return ModelRunnerOutput(encoder_failures=failures)
        if self._chosen_elsewhere is not None:
            self._expect(self._batch, pending, self._chosen_elsewhere())
            return with_broken(ModelRunnerOutput(), pending.broken.wait())
        if pending.draws is not None:
            return self._late_output(self._batch, pending, grammar, failures)
        if self._launcher is not None:
            self._take_tokens(self._batch, wait=True)
        began = time.perf_counter()
        output = with_broken(self._sampling.sample(self._batch, pending, grammar), pending.broken.wait())
        output.encoder_failures = failures
        output.seconds = pending.seconds + time.perf_counter() - began
        if self._drafting is not None:
            self._drafting.sampled(pending.inputs, pending.num_drafts_wanted)
        return output

    @torch.inference_mode()
    def draft(self) -> DraftTokenIds:
        """Return drafts of the tokens that follow the last sampled step."""
        if self._drafting is None or self._batch is None:
            return DraftTokenIds()
        return self._drafting.draft(self._batch)

    def _choice(self, batch: InputBatch, draws: PlainDraws, sampling_ids: list[str]) -> Choice:
        """Return the arguments with which the forward pass samples the step's tokens.

        The tokens of rows with rules are sampled again after the forward pass, so the forward pass samples them in the
        cheapest way.
        """
        rows, ruled = batch.rows_of(sampling_ids), batch.ruled(sampling_ids)
        return Choice(draws.greedy_in(ruled) if ruled else draws, self._newest.room_for(rows), rows)

    def _late_output(
        self, batch: InputBatch, pending: PendingStep, grammar: GrammarBitmask | None, failures: dict[str, str]
    ) -> Late[ModelRunnerOutput]:
        """Return the output of a step whose tokens the device samples. The output arrives later, when the host has
        received the tokens.

        If rules depend on tokens of previous steps, this method first waits for these tokens, while the device computes
        the step's forward pass.
        """
        sampling_ids = pending.inputs.sampling_ids
        while self._coming and batch.awaits_output(sampling_ids):
            self._take_oldest(batch)
        launched = self._sampling.launch(batch, pending, grammar, self._begin_copy)
        arrival = self._begin_copy(launched.tokens.results)
        if sampling_ids:
            expected = batch.expect_tokens(sampling_ids)
            if launched.stores:
                self._newest.keep(expected.rows, launched.tokens.token_ids)
            self._coming.append((expected, arrival))
        inputs, prompt_logprobs, broken = pending.inputs, pending.prompt_logprobs, pending.broken
        read = partial(read_late, inputs, prompt_logprobs, failures, arrival, launched.logprobs)
        return Late(lambda: with_broken(read(), broken.wait()))

    def _expect(self, batch: InputBatch, pending: PendingStep, arrival: Arrival | None) -> None:
        """Reserve positions for the tokens of a step that another worker samples.

        ``arrival`` is None if this worker does not need the tokens.
        """
        expected = batch.expect_tokens(pending.inputs.sampling_ids)
        if arrival is not None:
            self._coming.append((expected, arrival))

    def _prepare(self, batch: InputBatch, step: SchedulerOutput) -> StepInputs:
        """Return the inputs of a step. Waits for tokens of previous steps that the host needs for these inputs.

        The host needs these tokens if another worker samples them, or if the step has prompt embeddings or media
        embeddings.
        """
        self._take_tokens(batch, wait=False)
        drafts = step.scheduled_spec_decode_tokens
        inputs = batch.prepare(step.num_scheduled_tokens, drafts)
        while len(inputs.unknown) and self._chosen_elsewhere is not None and self._coming:
            self._take_oldest(batch)
            inputs = batch.prepare(step.num_scheduled_tokens, drafts)
        if len(inputs.unknown) and self._embeddings.are_in(inputs):
            self._take_tokens(batch, wait=True)
            inputs = batch.prepare(step.num_scheduled_tokens, drafts)
        return inputs

    def _take_tokens(self, batch: InputBatch, *, wait: bool) -> None:
        """Store the sampled tokens that the host has received. If ``wait`` is true, first wait for all other sampled
        tokens.
        """
        while self._coming and (wait or self._coming[0][1].arrived()):
            self._take_oldest(batch)

    def _take_oldest(self, batch: InputBatch) -> None:
        expected, arrival = self._coming.popleft()
        batch.take_tokens(expected, arrival.wait()[0, : len(expected.rows)])

    def to(self, device: torch.device) -> None:
        self._forward.to(device)
        self._towers.to(device)
        if self._drafting is not None:
            self._drafting.drafter.to(device)

    def _empty_batch(self, config: KVCacheConfig) -> InputBatch:
        return InputBatch(
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_groups=len(config.groups),
            eos_token_ids=self._model.eos_token_ids,
            model_rules=self._model.rules,
        )

    def _run_dummy(self) -> None:
        """Compute and sample a dummy token.

        If the forward pass replays graphs, the step uses the allocated KV cache. A temporary KV cache has other
        addresses, so all graphs would be dropped and captured again while requests wait.
        """
        if self.graph_capture is None or self._kv_cache is None:
            self._probe(Probe.prompt(self._model.vocab_size))
            return
        self._draw(self.graph_capture.run_alone(self._num_groups, self._kv_cache.block_size))

    def _probe(self, probe: Probe, rows: IntArray | None = None) -> None:
        """Run ``probe``, and sample from the logits of its tokens with the indices ``rows``, or of all its tokens if
        ``rows`` is None.
        """
        try:
            logits = probe_logits(self._forward, probe, rows)
        finally:
            self._forward.bind(self._caches)
            self._bind_states(self._state_layers)
        if self._chosen_elsewhere is None:
            self._draw(logits)

    def _draw(self, logits: torch.Tensor) -> None:
        """Sample from ``logits``, and drop the tokens."""
        half = np.full(len(logits), 0.5)
        self._sampler.sample(
            logits, SamplingInputs(DrawSettings.off(len(logits))._replace(temperature=half, top_p=half), half)
        )


# Runner of a model's layers in one pipeline stage.


class StageRunner:
    """``ModelRunner`` of one pipeline stage.

    The last stage samples tokens, and sends the tokens to the first stage, which needs them as inputs of later steps.
    Other stages only count the tokens. The outputs of all stages except the last are empty.
    """

    def __init__(self, model: LoadedModel, built: BuiltForward, links: StageLinks) -> None:
        self._links = links
        self._runner = GenerationRunner(model, built, chosen_elsewhere=None if links.is_last else self._learn_tokens)
        self.computing = built.computing
        self.graph_capture = None
        self.experts = None
        self.adapted = built.forward.adapted if isinstance(built.forward, StageForward) else None

    @property
    def info(self) -> ModelInfo:
        """Properties of the complete model. The stages compute different steps at the same time, so the engine prepares
        steps while earlier steps run.
        """
        return msgspec.structs.replace(self._runner.info, runs_ahead=True)

    @property
    def specs(self) -> dict[str, KVCacheSpec]:
        """KV cache specs of the stage's own layers."""
        return self._runner.specs

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the weights of the stage's own layers."""
        return self._runner.weight_bytes

    @property
    def caches(self) -> LayerCaches:
        """KV cache of the stage's own layers."""
        return self._runner.caches

    @property
    def state_layers(self) -> StateLayers:
        """Allocated memory for the states of the stage's own recurrent layers."""
        return self._runner.state_layers

    @property
    def state_bytes(self) -> int:
        """Size in bytes of the memory for the states of the stage's own recurrent layers."""
        return self._runner.state_bytes

    @property
    def graphs(self) -> GraphStats:
        """Statistics of CUDA graphs. All numbers are 0, because pipeline stages replay no steps."""
        return self._runner.graphs

    def profile(self, num_tokens: int, num_seqs: int) -> None:
        """Run this stage's part of the profiling step."""
        self._runner.profile(num_tokens, num_seqs)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the KV cache of the stage's own layers. Layers of other stages are removed from the groups of
        ``config``.
        """
        self._runner.initialize_kv_cache(own_groups(config, self.specs))

    def drop_kv_cache(self) -> None:
        self._runner.drop_kv_cache()

    def recover(self) -> None:
        """Forget every request, and run this stage's part of the test of the device. The test token passes through all
        stages.
        """
        self._runner.recover()

    def execute_dummy_batch(self) -> None:
        """Run this stage's part of a dummy step. The dummy token passes through all stages."""
        self._runner.execute_dummy_batch()

    def execute(self, step: SchedulerOutput) -> None:
        """Run this stage's part of the step after the previous stage.

        Raises StageFailedError if the previous stage failed in this step, or if the last stage failed in the step
        before.
        """
        if step.num_scheduled_tokens:
            self._links.begin()
        try:
            self._runner.execute(step)
        except BaseException:
            self._links.fail()
            raise

    def sample(self, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput | Late[ModelRunnerOutput]:
        """Return the output of the step, which is empty in all stages except the last."""
        try:
            output = self._runner.sample(grammar)
            if self._links.is_last and isinstance(output, ModelRunnerOutput) and output.request_ids:
                self._links.send_tokens([token for tokens in output.sampled_token_ids for token in tokens])
        except BaseException:
            self._links.fail()
            raise
        return output

    def draft(self) -> DraftTokenIds:
        """Return no drafts, because pipeline stages have no drafter."""
        return DraftTokenIds()

    def step_seconds(self, num_tokens: int, passes: int) -> float:  # noqa: ARG002 - as of all runners
        """Return 0, because step times are needed only for drafting and pipeline stages have no drafter."""
        return 0.0

    def to(self, device: torch.device) -> None:
        """Move the stage's own weights."""
        self._runner.to(device)

    def _learn_tokens(self) -> Arrival | None:
        return self._links.tokens() if self._links.is_first else None
