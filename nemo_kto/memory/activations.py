"""Activation memory: bytes that a forward pass saves for its backward pass, from the shapes of the layers.

The counts are those that autograd actually saves (compared in tests/distributed/memory/test_plan_activations.py). The terms
are those of Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), for RMS norms, gated MLPs, grouped heads and fused
attention, and without dropout. They depend neither on values nor on the length of a sequence: each token takes the same
number of bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.lora import EMBEDDING, GATE_UP, LoRASettings, has_adaptable_experts, linear_modules
from nemo_kto.mixers import LinearLayer, Saving, SequenceMixer
from nemo_kto.mixers.mixer import FP32
from nemo_kto.mixers.param_mapping import Layers

# Bytes per token that a router saves. For each expert: its probability in fp32 and whether it was chosen, both again to send
# tokens back. For each choice: its weight, the index of the token, and the token's position among those of the expert.
_EXPERT_BYTES, _CHOICE_BYTES = 9, 24


class _Adapted(NamedTuple):
    """A linear layer that adapters can change."""

    layer: LinearLayer
    products: float  # products A x per token
    all_rows: float  # rows of all its matrices on a rank
    share: float = 1.0  # fraction of the model's layers that have it


@dataclass(frozen=True, kw_only=True)
class Activations(Saving):
    """Formula for the activations that one rank saves; bytes per token are for each token that the rank has."""

    architecture: Architecture
    adapters: LoRASettings | None = None

    def layer(self, recomputed: Collection[str] = ()) -> float:
        """Return the bytes per token of a layer, on average over all layers, except inside the ``recomputed`` modules."""
        core = "core_attn" not in recomputed
        saved = sum(share * mixer.saved_bytes(self, core=core) for mixer, share in self._mixers())
        saved += self._norms() + self._adapter_inputs(recomputed)
        if "mlp" in recomputed:  # its input is saved, whether or not the gradient of a weight needs it
            return saved + self._share(Layers.FEED_FORWARD) * self.layer_input()
        return saved + self._mean(self._dense_mlp(), self._experts())

    def layer_input(self) -> float:
        """Return the bytes per token of the hidden state before a layer, all that a recomputed layer saves."""
        return self.element_bytes * self.hidden

    def tables(self) -> int:
        """Return the bytes per position of the tables that layers share, such as those of RoPE."""
        return sum(mixer.table_bytes(self) for mixer in set(self.architecture.mixers))

    def adapter_matrices(self, recomputed: Collection[str] = ()) -> float:
        """Return the bytes per micro-batch of the matrices that the adapters of one layer save.

        These are each fused B, expanded to a block matrix over the parts of its layer; with DoRA also the change of each
        row and, in fp32, its derivative with respect to the magnitude.
        """
        if self.adapters is None:
            return 0
        total = 0.0
        for adapted in self._adapted(recomputed):
            if (parts := len(adapted.layer.modules)) > 1:
                total += adapted.share * self.element_bytes * adapted.all_rows * parts * (self.adapters.rank + 1)
            total += adapted.share * (self.element_bytes + FP32) * adapted.layer.rows * self.adapters.dora
        return total

    def gradients_of_layer(self) -> float:
        """Return the bytes per token of temporaries that exist at the same time in the backward pass of a layer.

        For an MLP: the gradients of the product of activated gate and up projection and of both projections, and the
        activated gate; two of them without a gate. Those of a sequence mixer, if that is more.
        """
        values, dense = 2 * self._inputs(), self._share(Layers.DENSE)
        mlp = self.element_bytes * values * max(self._ffn() if dense else 0, self._chosen_ffn(), self._shared_ffn())
        return max(mlp, *(mixer.backward_bytes(self) for mixer in set(self.architecture.mixers)))

    def embedding(self) -> int:
        """Return the bytes per token of the embedding on the first stage.

        These are the index of the token's row of the table and whether this rank has it; with an adapter both again, and the
        row that the adapter looked up.
        """
        if self.adapters is not None and EMBEDDING in self.adapters.modules:
            return 2 * (8 + 1) + self.adapters.rank * self.element_bytes
        return 8 + 1

    def head(self) -> float:
        """Return the bytes on the last stage per token with a log-prob: final norm, hidden states, their fp32 gradient."""
        whole = self.architecture.hidden_size * self.element_bytes
        return self.norm(self.hidden, trained=self.adapters is None) + 3 * whole + 4 * self.architecture.hidden_size

    def _norms(self) -> float:
        if self.architecture.layer_norm:  # the input, mean and deviation
            of_norm = self.element_bytes * self.hidden + 2 * FP32 * self.hidden / self.architecture.hidden_size
        else:
            of_norm = self.norm(self.hidden, trained=self.adapters is None)
        return self.architecture.norms * of_norm

    def _mixers(self) -> Iterator[tuple[SequenceMixer, float]]:
        """Yield each sequence mixer of the model with the fraction of layers that have it."""
        mixers = self.architecture.mixers
        yield from ((mixer, count / len(mixers)) for mixer, count in Counter(mixers).items())

    def _share(self, kind: Layers) -> float:
        """Return the fraction of layers of a kind."""
        return self.architecture.layers_with[kind].count(True) / self.architecture.num_layers

    def _mean(self, dense: float, sparse: float) -> float:
        """Return the mean over all layers of a value for layers with a dense MLP and a value for layers with experts."""
        return self._share(Layers.DENSE) * dense + self._share(Layers.SPARSE) * sparse

    def _inputs(self) -> int:
        """Return the number of an MLP's projections of its input: gate and up projection, or only the latter."""
        return 1 + self.architecture.family.gated_mlp

    def _ffn(self) -> float:
        return self.architecture.ffn_hidden_size / self.architecture.tensor_parallel

    def _chosen_ffn(self) -> float:
        """Return the total width of the experts that a token chooses, on average over the ranks that exchange tokens."""
        experts = self.architecture.experts
        return 0.0 if experts is None else experts.per_token * experts.ffn_hidden_size / self.architecture.tensor_parallel

    def _copies(self) -> float:
        """Return the copies of a token on a rank, on average: one for each chosen expert and each rank that shares it."""
        if (experts := self.architecture.experts) is None:
            return 0.0
        return experts.per_token * self.architecture.expert_tensor_parallel / self.architecture.tensor_parallel

    def _shared_ffn(self) -> float:
        experts = self.architecture.experts
        return 0.0 if experts is None else experts.shared_ffn_hidden_size / self.architecture.tensor_parallel

    def _experts(self) -> float:
        """Return the bytes per token of router, experts and shared expert.

        Router and experts save the token and its copies, the gate and up projections, their product before and after
        multiplication by the router probability (or the copies before and after it), and the router's values for each
        expert. A shared expert saves the gate and up projections, their product and, if it has a gate, its output and the
        gate's value.
        """
        if (experts := self.architecture.experts) is None:
            return 0.0
        hidden, keeps_product = self.hidden, self.keeps_input("down_proj")
        trained = self.adapters is None or self._adapts_experts()
        saved = (self._inputs() + (not experts.weighs_input) + (trained and keeps_product)) * self._chosen_ffn() + hidden
        copies = experts.weighs_input + (trained and self.keeps_input("gate_proj", "up_proj"))
        saved += self._copies() * self.architecture.hidden_size * copies
        of_router = _EXPERT_BYTES * experts.number + _CHOICE_BYTES * experts.per_token
        if shared := self._shared_ffn():
            saved += (self._inputs() + keeps_product) * shared + hidden * experts.shared_gate
        of_norm = 0.0
        if experts.normed:  # the router's input in fp32, in fp32 that of the other norms; normalised; scaled
            of_norm = FP32 * hidden * (1 if self.element_bytes < FP32 else -1)
            of_norm += self.element_bytes * hidden * (1 + (self.adapters is None))
        return self.element_bytes * saved + of_norm + of_router * hidden / self.architecture.hidden_size

    def _dense_mlp(self) -> float:
        ffn = self._ffn()
        saved = (self._inputs() + self.keeps_input("down_proj")) * ffn  # projections, and the down projection's input
        is_saved = self.architecture.parallel and self.keeps_input("q_proj", "k_proj", "v_proj")  # the same as attention's
        return self.element_bytes * (saved + self.hidden * (self.keeps_input(*self._first()) and not is_saved))

    def _adapter_inputs(self, recomputed: Collection[str]) -> float:
        """Return the bytes per token that adapters save.

        These are the products A x, as wide as the adapter's rank; with dropout also the inputs after dropout and the dropout
        mask, which on the CPU consists of the factors themselves; with DoRA also the outputs that the magnitudes scale.
        """
        if self.adapters is None:
            return 0.0
        dropped = (self.element_bytes + (1 if self.on_gpu else self.element_bytes)) * (self.adapters.dropout > 0)
        saved = 0.0
        for adapted in self._adapted(recomputed):
            values = adapted.products * self.adapters.rank + adapted.layer.outputs * self.adapters.dora
            saved += adapted.share * (dropped * adapted.layer.inputs + self.element_bytes * values)
        return saved

    def _adapted(self, recomputed: Collection[str]) -> list[_Adapted]:
        """Return the linear layers with adapters, except those inside the ``recomputed`` modules."""
        layers = [
            _Adapted(layer, products=len(layer.modules), all_rows=layer.rows, share=share)
            for mixer, share in self._mixers()
            for layer in mixer.linear_layers(self)
        ]
        if "mlp" not in recomputed:
            layers += self._mlp_layers()
        return [adapted for adapted in layers if self.adapts(*adapted.layer.modules)]

    def _first(self) -> tuple[str, ...]:
        """Return the matrices of an MLP's first layer, by their names in LoRA's settings."""
        is_fused = GATE_UP in linear_modules(self.architecture.family)
        return (GATE_UP,) if is_fused else ("gate_proj", "up_proj")[-self._inputs() :]

    def _adapts_experts(self) -> bool:
        """Return whether routed experts have adapters if their modules do."""
        return self.adapters is not None and self.adapters.experts and has_adaptable_experts(self.architecture.family)

    def _mlp_layers(self) -> tuple[_Adapted, _Adapted]:
        """Return the linear layers of MLPs, experts and shared experts, on average over all layers."""
        hidden, width, sizes = self.hidden, self.architecture.hidden_size, self.architecture.sizes
        adaptable, shared = self._adapts_experts(), self._shared_ffn()
        copies, chosen = adaptable * self._copies(), adaptable * self._chosen_ffn()
        products = self._mean(1, copies + (shared > 0))
        # a product for each copy of a token, a matrix for each expert of this rank, and DoRA only on the shared expert
        experts = adaptable * sizes["expert_ffn"] * sizes["experts"] / self.expert_parallel + shared
        names, inner = self._first(), self._inputs() * self._mean(self._ffn(), shared)
        inputs = self._mean(hidden, copies * width + hidden * (shared > 0))
        first = LinearLayer(names, inputs, inner, inner)
        share = self._share(Layers.FEED_FORWARD)
        last = LinearLayer(("down_proj",), self._mean(self._ffn(), chosen + shared), share * width, share * hidden)
        rows = self._inputs() * self._mean(self._ffn(), experts)
        return _Adapted(first, len(names) * products, rows), _Adapted(last, products, share * width)
