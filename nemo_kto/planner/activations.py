"""Activation memory: bytes that a forward pass saves for its backward pass, from the shapes of the layers.

The counts are those that autograd actually saves (compared in tests/distributed/planner/test_plan_activations.py). The terms
are those of Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), for RMS norms, gated MLPs, grouped heads and fused
attention, and without dropout. They depend neither on values nor on the length of a sequence: each token takes the same
number of bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.lora import EMBEDDING, LoRASettings, has_adaptable_experts
from nemo_kto.models.layers.block_attention import BLOCK

_FP32 = 4
# Bytes per token that a router saves. For each expert: its probability in fp32 and whether it was chosen, both again to send
# tokens back. For each choice: its weight, the index of the token, and the token's position among those of the expert.
_EXPERT_BYTES, _CHOICE_BYTES = 9, 24
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Formula for the activations that one rank saves; bytes per token are for each token that the rank has."""

    architecture: Architecture  # also determines the tensor-parallel size
    element_bytes: int  # bytes per value of the model: 4 in fp32, 2 in bf16
    sequence_parallel: bool = False  # norms and the operations around them are sharded over the tensor-parallel ranks
    context_parallel: int = 1
    expert_parallel: int = 1
    adapters: LoRASettings | None = None  # None if all weights are trained
    # On a GPU norms are one kernel, and queries and keys are rotated before the core attention. On the CPU the core
    # attention rotates them, and norms in bf16 are several operations that save their input and their normalised input,
    # both in fp32.
    on_gpu: bool = False
    packed: bool = False  # on the CPU attention processes packed sequences one by one and concatenates the outputs

    def layer(self, recomputed: Collection[str] = ()) -> float:
        """Return the bytes per token of a layer, on average over all layers, except inside the ``recomputed`` modules."""
        attention = self._attention(core="core_attn" not in recomputed)
        if "mlp" in recomputed:  # its input is saved, whether or not the gradient of a weight needs it
            return self._norms() + attention + self.layer_input() + self._adapter_inputs(_ATTENTION)
        mlp = self._mean(self._dense_mlp(), self._experts())
        return self._norms() + attention + mlp + self._adapter_inputs(_ATTENTION | _MLP)

    def layer_input(self) -> float:
        """Return the bytes per token of the hidden state before a layer, all that a recomputed layer saves."""
        return self.element_bytes * self._hidden()

    def rotations(self) -> int:
        """Return the bytes per position of the RoPE tables, shared by all layers: cosines, and sines for half a head."""
        tables = 1 if self.architecture.local_rope is None else 2
        element_bytes = _FP32 if self.architecture.family.interleaved_rotary else self.element_bytes
        return tables * 3 * element_bytes * self.architecture.head_dim // 2

    def adapter_matrices(self, recomputed: Collection[str] = ()) -> float:
        """Return the bytes per micro-batch of the matrices that the adapters of one layer save.

        These are each fused B, expanded to a block matrix over the parts of its layer; with DoRA also the change of each
        row and, in fp32, its derivative with respect to the magnitude.
        """
        if self.adapters is None:
            return 0
        fused: list[tuple[float, int]] = [(self._query() + 2 * self._key_value(), 3)] * self._adapts(
            "q_proj", "k_proj", "v_proj"
        )
        sizes, adaptable = self.architecture.sizes, has_adaptable_experts(self.architecture.family)
        experts = adaptable * sizes["expert_ffn"] * sizes["experts"] / self.expert_parallel  # all experts of this rank
        experts += self._shared_ffn()
        fused += [(2 * self._mean(self._ffn(), experts), 2)] * (
            self._adapts("gate_proj", "up_proj") and "mlp" not in recomputed
        )
        spread = sum(self.element_bytes * rows * parts * (self.adapters.rank + 1) for rows, parts in fused)
        changed = self._changed_outputs(_ATTENTION if "mlp" in recomputed else _ATTENTION | _MLP)
        return spread + (self.element_bytes + _FP32) * sum(rows for rows, _ in changed)

    def gradients_of_layer(self) -> float:
        """Return the bytes per token of temporaries that exist at the same time in the backward pass of a layer.

        For an MLP: the gradients of the product of activated gate and up projection and of both projections, and the
        activated gate. For attention in blocks, if that is more: the scores of a block of queries in fp32, their gradients
        and two further tensors of that size.
        """
        mlp = self.element_bytes * 4 * max(self._ffn() if self._dense() else 0, self._chosen_ffn(), self._shared_ffn())
        heads = self.architecture.padded_attention_heads / self.architecture.tensor_parallel
        return max(mlp, 4 * _FP32 * heads * BLOCK * self.architecture.attends_in_blocks)

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
        return self._norm(self._hidden(), trained=self.adapters is None) + 3 * whole + 4 * self.architecture.hidden_size

    def _norms(self) -> float:
        count = 2 * (self.architecture.pre_norm + self.architecture.post_norm)
        return count * self._norm(self._hidden(), trained=self.adapters is None)

    def _norm(self, width: float, *, trained: bool) -> float:
        if self.on_gpu or self._few_passes():
            is_widened = self.architecture.zero_centered_norm  # to fp32 before the norm, which saves its input
            return (_FP32 if is_widened else self.element_bytes) * width + 4 * width / self.architecture.hidden_size
        return (8 if trained else 4) * width + 4 * width / self.architecture.hidden_size

    def _few_passes(self) -> bool:
        """Return whether norms use the CPU function of models/layers/norm.py."""
        return not self.on_gpu and self.element_bytes == _FP32

    def _attention(self, *, core: bool) -> float:
        architecture, query, key_value = self.architecture, self._query(), self._key_value()
        heads = (architecture.padded_attention_heads + architecture.padded_query_groups) / architecture.tensor_parallel
        # otherwise the core attention saves its inputs: queries, and two views
        rotates_before = core or (self.on_gpu and not architecture.unsupported_by_te)
        # attention in blocks does not save its output; the output projection saves it if it needs its input
        output = query * (not architecture.attends_in_blocks or self._keeps_input("o_proj"))
        # the fused queries, keys and values, of which the values are a view, and the output
        saved: float = self.element_bytes * (query + 2 * key_value + output)
        saved += self.element_bytes * (query + (key_value if rotates_before else 0))
        if self.context_parallel > 1 and core and not self.on_gpu:
            # queries, outputs, and the keys and values of all ranks; also the fused tensor if a norm saves views of it
            saved = self.element_bytes * (query + output + 2 * self.context_parallel * key_value)
            saved += self.element_bytes * (query + 2 * key_value) * (architecture.qk_norm and self._few_passes())
        if core:
            saved += 4 * architecture.padded_attention_heads / architecture.tensor_parallel  # log-sum-exp of each head
            joined = (self.packed or self.context_parallel > 1) and not self.on_gpu and not architecture.attends_in_blocks
            saved += self.element_bytes * query * (joined and self._keeps_input("o_proj"))
        if core and architecture.rotated_norm:  # the input of the norm in fp32, and the root mean square of each head
            rotating = architecture.rotates.count(True) / architecture.num_layers
            saved += rotating * _FP32 * (query + key_value + heads)
        if architecture.all_heads_norm:  # queries, a view of the fused keys, and the root mean square of each
            saved += self.element_bytes * query + 2 * _FP32
        elif architecture.qk_norm:
            keys = 0 if self._few_passes() else key_value  # otherwise a view of the fused tensor suffices
            saved += self._norm(query + keys, trained=self.adapters is None) + 4 * heads
        return saved + self.element_bytes * self._hidden() * self._keeps_input("q_proj", "k_proj", "v_proj")

    def _dense(self) -> float:
        """Return the fraction of layers with one dense MLP."""
        return self.architecture.sparse_layers.count(False) / self.architecture.num_layers

    def _mean(self, dense: float, sparse: float) -> float:
        """Return the mean over all layers of a value for layers with a dense MLP and a value for layers with experts."""
        return self._dense() * dense + (1 - self._dense()) * sparse

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
        hidden, keeps_product = self._hidden(), self._keeps_input("down_proj")
        trained = self.adapters is None or has_adaptable_experts(self.architecture.family)
        saved = (2 + (not experts.weighs_input) + (trained and keeps_product)) * self._chosen_ffn() + hidden
        copies = experts.weighs_input + (trained and self._keeps_input("gate_proj", "up_proj"))
        saved += self._copies() * self.architecture.hidden_size * copies
        of_router = _EXPERT_BYTES * experts.number + _CHOICE_BYTES * experts.per_token
        if shared := self._shared_ffn():
            saved += (2 + keeps_product) * shared + hidden * experts.shared_gate
        return self.element_bytes * saved + of_router * hidden / self.architecture.hidden_size

    def _dense_mlp(self) -> float:
        ffn = self._ffn()
        saved = 2 * ffn + ffn * self._keeps_input("down_proj")  # gate and up projection, and the down projection's input
        return self.element_bytes * (saved + self._hidden() * self._keeps_input("gate_proj", "up_proj"))

    def _adapter_inputs(self, kept: frozenset[str]) -> float:
        """Return the bytes per token that adapters save.

        These are the products A x, as wide as the adapter's rank; with dropout also the inputs after dropout and the dropout
        mask, which on the CPU consists of the factors themselves; with DoRA also the outputs that the magnitudes scale.
        """
        if self.adapters is None:
            return 0.0
        hidden, width = self._hidden(), self.architecture.hidden_size
        adaptable, shared = has_adaptable_experts(self.architecture.family), self._shared_ffn()
        copies, chosen = adaptable * self._copies(), adaptable * self._chosen_ffn()
        inputs = {  # width of the layer's input, and number of parts of the fused layer
            ("q_proj", "k_proj", "v_proj"): (hidden, 3),
            ("o_proj",): (self._query(), 1),
            ("gate_proj", "up_proj"): (
                self._mean(hidden, copies * width + hidden * (shared > 0)),
                2 * self._mean(1, copies + (shared > 0)),
            ),
            ("down_proj",): (self._mean(self._ffn(), chosen + shared), self._mean(1, copies + (shared > 0))),
        }
        adapted = [sizes for names, sizes in inputs.items() if kept.issuperset(names) and self._adapts(*names)]
        each = self.element_bytes + (1 if self.on_gpu else self.element_bytes)
        dropped = each * sum(width for width, _ in adapted) if self.adapters.dropout else 0
        changed = self.element_bytes * sum(values for _, values in self._changed_outputs(kept))
        return dropped + changed + self.element_bytes * self.adapters.rank * sum(parts for _, parts in adapted)

    def _changed_outputs(self, kept: frozenset[str]) -> list[tuple[float, float]]:
        """Return the rows on a rank and the output values per token of each DoRA layer; of experts only shared ones."""
        if self.adapters is None or not self.adapters.dora:
            return []
        fused, hidden = self._query() + 2 * self._key_value(), (self.architecture.hidden_size, self._hidden())
        gated = 2 * self._mean(self._ffn(), self._shared_ffn())
        outputs: dict[tuple[str, ...], tuple[float, float]] = {
            ("q_proj", "k_proj", "v_proj"): (fused, fused),
            ("o_proj",): hidden,
            ("gate_proj", "up_proj"): (gated, gated),
            ("down_proj",): hidden,
        }
        return [sizes for names, sizes in outputs.items() if kept.issuperset(names) and self._adapts(*names)]

    def _keeps_input(self, *names: str) -> bool:
        """Return whether a layer saves its input for the gradient of its weight or of an adapter without dropout."""
        return self.adapters is None or (self._adapts(*names) and not self.adapters.dropout)

    def _adapts(self, *names: str) -> bool:
        return self.adapters is not None and not set(names).isdisjoint(self.adapters.modules)

    def _hidden(self) -> float:
        return self.architecture.hidden_size / (self.architecture.tensor_parallel if self.sequence_parallel else 1)

    def _query(self) -> int:
        return self.architecture.padded_attention_heads * self.architecture.head_dim // self.architecture.tensor_parallel

    def _key_value(self) -> int:
        groups = max(1, self.architecture.padded_query_groups // self.architecture.tensor_parallel)
        return groups * self.architecture.head_dim
