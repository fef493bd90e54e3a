from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_kto.architecture.rope import read_rope
from nemo_kto.layers import rope_tables
from nemo_kto.layers.attention import PackedSequences, RepeatedHeads, TorchAttention, packed_attention
from nemo_kto.layers.layer_settings import Temperature
from nemo_kto.layers.rope_tables import RopeTable, TemperatureTable
from tests.helpers.messages import Message, raises

S, B, HEADS, GROUPS, D = 10, 2, 6, 2, 4


FEATURES = ("chunked", "rope", "norm_after_rope", "temperature", "sinks")


def attention(*, layer: int = 1, scale: float | None = None, **settings: Any) -> TorchAttention:
    """Attention with these features and settings of megatron-core's configuration."""
    features = {name: settings.pop(name) for name in FEATURES if name in settings}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HEADS * D,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=D,
        **{"attention_dropout": 0.0, **settings},
    )
    return TorchAttention(
        config=config,
        layer_number=layer,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        cp_comm_type=None,
        softmax_scale=scale,
        pg_collection=None,
        **features,
    )


def heads() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(S, B, number, D, generator=draw) for number in (HEADS, GROUPS, GROUPS))  # type: ignore[return-value]


def reference(seen: torch.Tensor, scale: float = 1 / math.sqrt(D), sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attention written out: head h uses key-value head h // (HEADS / GROUPS). A sink has no value."""
    query, key, value = heads()
    out = torch.zeros(S, B, HEADS, D)
    for batch in range(B):
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            scores = query[:, batch, head] @ key[:, batch, group].T * scale
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].expand(S, 1)], dim=-1)
            out[:, batch, head] = scores.softmax(-1)[:, :S] @ value[:, batch, group]
    return out.reshape(S, B, HEADS * D)


CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()


def test_causal_with_grouped_heads() -> None:
    torch.testing.assert_close(attention()(*heads(), None), reference(CAUSAL))


def test_softmax_scale() -> None:
    torch.testing.assert_close(attention(scale=0.9)(*heads(), None), reference(CAUSAL, 0.9))


def test_window_counts_the_token_itself() -> None:
    distance = torch.arange(S)[:, None] - torch.arange(S)[None, :]
    found = attention(window_size=(2, 0))(*heads(), None)
    torch.testing.assert_close(found, reference(CAUSAL & (distance < 3)))


def test_window_of_some_layers() -> None:
    found = attention(window_size=(2, 0), window_attn_skip_freq=[1, 0], layer=2)(*heads(), None)
    torch.testing.assert_close(found, reference(CAUSAL))


def test_a_token_sees_its_chunk() -> None:
    """The last of three chunks is shorter."""
    chunk = torch.arange(S) // 4
    found = attention(chunked=True, window_size=(3, 0))(*heads(), None)
    torch.testing.assert_close(found, reference(CAUSAL & (chunk[:, None] == chunk[None, :])))


def test_chunks_begin_with_each_sequence_of_a_row() -> None:
    query, key, value = (each[:, 0] for each in heads())
    layer = attention(chunked=True, window_size=(3, 0))
    found = layer(query, key, value, None, packed_seq_params=PackedSequences.of([(6, 4)])[0])
    alone = [layer(*(each[part][:, None] for each in (query, key, value)), None)[:, 0] for part in (slice(6), slice(6, S))]
    torch.testing.assert_close(found, torch.cat(alone))


def test_normalisation_follows_rotation() -> None:
    """Layers with a rotation normalise: the sum of the squares of a head is its size, up to epsilon."""
    query, key, value = heads()
    rope = read_rope({"rope_theta": 1e4, "hidden_size": D, "num_attention_heads": 1})
    settings: dict[str, Any] = {"norm_after_rope": True, "layernorm_epsilon": 0.5, "no_rope_freq": [0, 1]}
    found = attention(rope=RopeTable(rope=rope), **settings)(query, key, value, None)
    table = RopeTable(rope=rope)
    normed = [each / (each.square().mean(-1, keepdim=True) + 0.5).sqrt() for each in map(table.rotate, (query, key))]
    torch.testing.assert_close(found, attention()(*normed, value, None))
    found = attention(rope=table, layer=2, **settings)(query, key, value, None)
    torch.testing.assert_close(found, reference(CAUSAL), msg="a layer without a rotation has no norm")


def test_queries_are_scaled_in_layers_without_rotation() -> None:
    query, key, value = heads()
    table = TemperatureTable(temperature=Temperature(floor=4, scale=0.5))
    # positions 0 to 2 stay below the floor; from position 3 on it is reached once, from position 7 on twice
    factor = torch.tensor([1.0] * 3 + [1 + 0.5 * math.log(2)] * 4 + [1 + 0.5 * math.log(3)] * 3)
    expected = attention()(query * factor[:, None, None, None], key, value, None)
    torch.testing.assert_close(attention(temperature=table)(query, key, value, None), expected)
    rope = RopeTable(rope=read_rope({"rope_theta": 1e4, "hidden_size": D, "num_attention_heads": 1}))
    rotated = [attention(rope=rope, temperature=each)(query, key, value, None) for each in (table, None)]
    assert torch.equal(*rotated), "not in layers with one"


SINKS = torch.linspace(-2.0, 3.0, HEADS)


@pytest.mark.parametrize("window", [None, (2, 0)])
def test_sinks(window: tuple[int, int] | None) -> None:
    distance = torch.arange(S)[:, None] - torch.arange(S)[None, :]
    seen = CAUSAL if window is None else CAUSAL & (distance < 3)
    module = attention(window_size=window, sinks=True)
    assert module.softmax_offset is not None
    module.softmax_offset.data = SINKS
    torch.testing.assert_close(module(*heads(), None), reference(seen, sinks=SINKS))


def test_a_rank_uses_the_sinks_of_its_heads() -> None:
    """Sinks count in the norm of the gradient on every rank."""
    sinks: Any = attention(sinks=True, tensor_model_parallel_size=2).softmax_offset
    assert (sinks.shape, sinks.tensor_model_parallel, sinks.partition_dim) == ((HEADS // 2,), True, 0)
    assert attention().softmax_offset is None


def row_of(lengths: tuple[int, ...]) -> PackedSequences:
    return PackedSequences.of([lengths])[0]


@pytest.mark.parametrize("window", [None, (2, 0)])
def test_packed_sequences_equal_separate_ones(window: tuple[int, int] | None) -> None:
    layer = attention(window_size=window)
    layer.rope = RopeTable(rope=read_rope({"rope_theta": 1e4, "hidden_size": D, "num_attention_heads": 1}))
    row = [each[:, 0].clone().requires_grad_() for each in heads()]
    alone = [each[:, :1].clone().requires_grad_() for each in heads()]
    lengths, grad = (3, 6, 1), torch.randn(S, HEADS * D)
    found = layer(*row, None, packed_seq_params=row_of(lengths))
    parts = zip(*(each.split(lengths) for each in alone), strict=True)
    expected = torch.cat([layer(*part, None) for part in parts]).squeeze(1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    found_grads, expected_grads = torch.autograd.grad(found, row, grad), torch.autograd.grad(expected, alone, grad)
    for found_grad, expected_grad in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(found_grad, expected_grad.squeeze(1), rtol=1e-6, atol=1e-6)


def described(
    query: Any, key: Any, value: Any, begin_n: Any, begin_k_n: Any, *longest: int, scale: float, window_size: tuple[int, int]
) -> torch.Tensor:
    """The kernel for packed sequences by torch's description of its arguments; it takes grouped heads."""
    left, right = window_size
    assert (right, query.shape[2] % 8) == (0, 0)
    assert longest == tuple(int(begin.diff().max()) for begin in (begin_n, begin_k_n))
    parts = []
    for (start, stop), (first, last) in zip(
        *(itertools.pairwise(each.tolist()) for each in (begin_n, begin_k_n)), strict=True
    ):
        distance = torch.arange(last - first - stop + start, last - first)[:, None] - torch.arange(last - first)
        seen = (distance >= 0) & ((distance <= left) | torch.tensor(left == -1))
        q, k, v = (each.transpose(0, 1) for each in (query[start:stop], key[first:last], value[first:last]))
        part = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        parts.append(part.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize(("window", "chunked"), [(None, False), ((2, 0), False), ((3, 0), True), ((5, 0), True)])
def test_packed_sequences_in_one_kernel(window: tuple[int, int] | None, chunked: bool) -> None:
    """Only a GPU has the kernel. Heads of four values are padded with zeros to eight, which changes nothing; keys are not
    repeated. It is not called where a sequence has several chunks, nor for heads that are too large for it."""
    shapes = list[tuple[int, ...]]()

    def kernel(*inputs: Any, **options: Any) -> torch.Tensor:
        shapes.append((*inputs[0].shape, *inputs[1].shape))
        return described(*inputs, **options)

    layer = attention(window_size=window, chunked=chunked)
    layer.rope = RopeTable(rope=read_rope({"rope_theta": 1e4, "hidden_size": D, "num_attention_heads": 1}))
    row = [each[:, 0] for each in heads()]
    expected = layer(*row, None, packed_seq_params=row_of((3, 6, 1)))
    layer.packed_kernel = kernel
    found = layer(*row, None, packed_seq_params=row_of((3, 6, 1)))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert shapes == [(S, HEADS, 8, S, GROUPS, 8)] * (window != (3, 0))
    layer.rope = None
    wide = [torch.randn(S, number, 264) for number in (HEADS, GROUPS, GROUPS)]
    assert layer(*wide, None, packed_seq_params=row_of((3, 6, 1))).shape == (S, HEADS * 264)
    assert len(shapes) == (window != (3, 0))


def test_keys_are_repeated_only_if_the_kernel_takes_no_grouped_heads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other_groups(query: Any, key: Any, value: Any, *lengths: Any, **options: Any) -> torch.Tensor:
        if query.size(1) > key.size(1):  # head h attends to the keys h % groups instead of h // (heads / groups)
            key, value = (each.repeat(1, query.size(1) // each.size(1), 1) for each in (key, value))
        return described(query, key, value, *lengths, **options)

    def other_gradient(query: Any, key: Any, *others: Any, **options: Any) -> torch.Tensor:
        key = key if query.size(1) == key.size(1) else 2 * key - key.detach()
        return described(query, key, *others, **options)

    def refuses(query: Any, key: Any, *others: Any, **options: Any) -> torch.Tensor:
        if query.size(1) != key.size(1):
            raise ValueError("Expect query and key/value to have the same number of heads\nmore")
        return described(query, key, *others, **options)

    cases = {described: (), other_groups: ("differ",), other_gradient: ("differ",), refuses: ("ValueError: Expect query",)}
    row = [each[:, 0] for each in heads()]
    expected = attention()(*row, None, packed_seq_params=row_of((3, 6, 1)))
    assert attention().packed_kernel is None, "a CPU has no such kernel"
    for each, names in cases.items():
        caplog.clear()
        packed_attention.cache_clear()
        monkeypatch.setattr("nemo_kto.layers.attention.varlen_attention", lambda dtype, each=each: each)
        with torch.device("meta"):  # a model that is built without values
            layers = [attention(), attention()]
        assert [layer.packed_kernel == (RepeatedHeads(each) if names else each) for layer in layers] == [True, True]
        found = [record.getMessage() for record in caplog.records]
        assert found == [Message("grouped heads", "repeated heads", *names)] * bool(names), "once a process"
        torch.testing.assert_close(
            layers[0](*row, None, packed_seq_params=row_of((3, 6, 1))), expected, rtol=1e-6, atol=1e-6
        )
    packed_attention.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_bias": torch.zeros(1)}, Message("attention_bias")),
        ({"attn_mask_type": AttnMaskType.padding}, Message("attn_mask_type", "padding")),
        ({"attn_mask_type": AttnMaskType.arbitrary}, Message("attn_mask_type", "arbitrary")),
    ],
)
def test_unsupported_arguments_are_refused(arguments: dict[str, Any], message: Message) -> None:
    with raises(ValueError, *message.parts):
        attention()(*heads(), None, **arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"apply_query_key_layer_scaling": True}, Message("apply_query_key_layer_scaling")),
        ({"attention_dropout": 0.1}, Message("attention_dropout", "0.0", "0.1")),
        ({"softmax_type": "off-by-one"}, Message("softmax_type", "vanilla", "off-by-one")),
    ],
)
def test_unsupported_configurations_are_refused(settings: dict[str, Any], message: Message) -> None:
    with raises(ValueError, *message.parts):
        attention(**settings)


@pytest.mark.parametrize("interleaved", [False, True])
def test_both_forms_of_the_rotation_are_the_same_function(interleaved: bool) -> None:
    """The form that torch compiles on a GPU, in eager mode; the inverse restores the heads."""
    draw = torch.Generator().manual_seed(0)
    heads_sbhd, angle_s11c = torch.randn(5, 2, 3, 8, generator=draw), torch.randn(5, 1, 1, 4, generator=draw)
    repeated = angle_s11c.repeat_interleave(2, dim=-1) if interleaved else angle_s11c.repeat(1, 1, 1, 2)
    table = repeated.cos(), angle_s11c.sin(), interleaved
    eager, fusable = rope_tables._rotate.eager, rope_tables._rotate.fusable
    rotated = eager(heads_sbhd, *table, False)
    torch.testing.assert_close(fusable(heads_sbhd, *table, False), rotated)
    for form in (eager, fusable):
        torch.testing.assert_close(form(rotated, *table, True), heads_sbhd)
