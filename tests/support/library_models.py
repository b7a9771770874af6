"""Model families of transformers: a small random configuration of each, with every kind of layer that it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_COMMON = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "use_cache": False}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_ALL_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
_SSD = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_groups": 1}
_DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 8,
}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
_BOTH = ["linear_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """A class of transformers and the sizes of a small one."""

    model: str
    sizes: dict[str, Any]

    def make(self, **sizes: Any) -> nn.Module:
        """A random model in training mode."""
        import transformers

        torch.manual_seed(0)
        kind = getattr(transformers, self.model)
        return kind(kind.config_class(**{**_COMMON, **self.sizes, **sizes})).train()


FAMILIES: dict[str, Family] = {
    "bamba": Family("BambaForCausalLM", {**_HEADS, **_SSD, "num_hidden_layers": 2, "attn_layer_indices": [1]}),
    "falcon_h1": Family("FalconH1ForCausalLM", {**_HEADS, **_SSD, "num_hidden_layers": 2, "mamba_d_ssm": 64}),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        {
            **_HEADS,
            **_SSD,
            "num_hidden_layers": 2,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "jamba": Family(
        "JambaForCausalLM",
        {
            **_HEADS,
            **_EXPERTS,
            "num_hidden_layers": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "kimi_linear": Family(
        "KimiLinearForCausalLM",
        {
            **_ALL_HEADS,
            "num_hidden_layers": 2,
            "layer_types": _BOTH,
            "linear_num_heads": 2,
            "linear_head_dim": 8,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "lfm2": Family("Lfm2ForCausalLM", {**_HEADS, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}),
    "minimax": Family(
        "MiniMaxForCausalLM",
        {**_HEADS, "num_hidden_layers": 2, "layer_types": _BOTH, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"head_dim": 8, "block_size": 8},
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        {
            **_HEADS,
            "layers_block_type": ["mamba", "attention", "moe"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "chunk_size": 8,
            "n_groups": 1,
        },
    ),
    "olmo_hybrid": Family(
        "OlmoHybridForCausalLM",
        {
            **_ALL_HEADS,
            "num_hidden_layers": 2,
            "layer_types": _BOTH,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
    ),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", {**_HEADS, **_DELTA, "num_hidden_layers": 2, "layer_types": _BOTH}),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        {
            **_HEADS,
            **_DELTA,
            **_EXPERTS,
            "num_hidden_layers": 2,
            "layer_types": _BOTH,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "recurrent_gemma": Family(
        "RecurrentGemmaForCausalLM",
        {"num_hidden_layers": 3, "num_attention_heads": 4, "lru_width": 32, "attention_window_size": 16},
    ),
    "rwkv": Family("RwkvForCausalLM", {"context_length": 64, "attention_hidden_size": 32, "num_hidden_layers": 2}),
    "xlstm": Family(
        "xLSTMForCausalLM",
        {"embedding_dim": 32, "num_hidden_layers": 2, "num_blocks": 2, "num_heads": 2, "chunk_size": 8},
    ),
    "zamba": Family(
        "ZambaForCausalLM",
        {
            **_ALL_HEADS,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "n_mamba_heads": 2,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "zamba2": Family(
        "Zamba2ForCausalLM",
        {
            **_ALL_HEADS,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "n_mamba_heads": 8,
            "mamba_d_state": 8,
            "mamba_headdim": 8,
            "mamba_ngroups": 1,
            "chunk_size": 8,
            "num_mem_blocks": 1,
        },
    ),
}
