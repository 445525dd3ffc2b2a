"""Layers of gpt-oss: those of a Llama with sinks and windows in its attention, and experts with biases in place of an MLP.

The model around them is CausalLM.  The experts' matrices are quantised.

Shapes: T tokens, H hidden size, E experts, K experts of a token (top_k), F width of an expert, Q query heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.attention.kinds import Scoring
from specdec.models.causal_lm import PreNormLayer
from specdec.models.experts import mixture
from specdec.models.gpt_oss.config import GptOssConfig
from specdec.models.layers import SelfAttention
from specdec.models.linear import LinearStack
from specdec.models.making import made_now, new_weight
from specdec.ops.products.experts import Form


class SinkAttention(SelfAttention):
    """Attention whose softmax has one more logit for each head.  sinks_Q: float32."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.sinks_Q = nn.Buffer(torch.empty(config.num_heads, dtype=torch.float32, device=made_now().device))

    @property
    def scoring(self) -> Scoring:
        return Scoring(sinks_H=self.sinks_Q)


class BiasedRouter(nn.Module):
    """Chooses the experts of the greatest logits, whose softmax are the weights.  Computes in float32, and is kept so."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        self.top_k, device = config.top_k, made_now().device
        self.weight_EH = nn.Buffer(torch.empty(config.count, config.hidden_size, dtype=torch.float32, device=device))
        self.bias_E = nn.Buffer(torch.empty(config.count, dtype=torch.float32, device=device))

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """The pair (topk_weights [T, K] float32, topk_ids [T, K] int64)."""
        logits_TE = F.linear(x_TH.to(self.weight_EH.dtype), self.weight_EH, self.bias_E)  # wider while a text is proven
        best_TK, topk_ids_TK = logits_TE.topk(self.top_k, dim=-1)
        return best_TK.softmax(-1), topk_ids_TK


class BiasedExperts(nn.Module):
    """A layer's mixture.  Of the ranks that share it, the first alone has down_bias_EH, for their outputs are summed."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        E, H, width = config.count, config.hidden_size, config.intermediate_size
        self.gate, self.shard = config.gate, config.shard
        self.router = BiasedRouter(config)
        self.gate_up_proj = LinearStack(E, H, {"gate_proj": width, "up_proj": width}, config.shard, "column")
        self.down_proj = LinearStack(E, width, {"down_proj": H}, config.shard, "row")
        self.gate_up_bias_EG = new_weight(E, 2 * width)
        self.down_bias_EH = new_weight(E, H) if config.shard.rank == 0 else None

    def forward(self, x_TH: Tensor) -> Tensor:
        topk_weights_TK, topk_ids_TK = self.router(x_TH)
        form = Form(self.gate, self.gate_up_bias_EG, self.down_bias_EH)
        return mixture(x_TH, topk_weights_TK, topk_ids_TK, self.gate_up_proj, self.down_proj, form)


def gpt_oss_layer(config: GptOssConfig, index: int) -> PreNormLayer:
    """A decoder layer with sinks and experts."""
    return PreNormLayer(config, SinkAttention(config), BiasedExperts(config))
