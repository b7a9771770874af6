"""What `adjcomp.explain` says of a model."""

from __future__ import annotations

import fidelity
import torch

import adjcomp

EXPECTED = """\
Residual: a residual stack of 3 layers between stem and head, d_model 8
  parameters in float32, residual stream in float32, batch size 2, any length T
  3 tile functions serve 5 layers; layers with the same letter share one

Tiles (kept: for the backward, a token, in units of d_model; what is dear to make alone / everything the VJP reads)
  layers                                  parameters       border            kept  VJP also reads
  stem                              A             72            -       0.0 / 0.0  -
  layers.0 to 2 (3)                 B            184        256 B       {kept}  input, border
  head                              C             64            -       0.0 / 0.0  input

From chunk to chunk
  B: linear_scan (2, 8, 4) float32, 256 B
  one border of all layers: 768 B

Read from the side, a chunk at a time
  args[0]: (2, T, 8) float32
Outputs
  the output: (2, T, 8) float32"""


def test_an_explanation_reads_as_before() -> None:
    found = adjcomp.explain(fidelity.diagonal_stack(vocab=None), (torch.zeros(2, 40, 8),))
    layer = found.groups[1]
    assert layer.lean is not None
    assert layer.full is not None
    assert layer.lean <= layer.full
    unit = found.d_model * found.itemsize * found.batch_size
    assert str(found) == EXPECTED.format(kept=f"{layer.lean / unit:.1f} / {layer.full / unit:.1f}")


def test_a_model_with_a_loss_is_explained_from_the_meta_device() -> None:
    with torch.device("meta"):
        model = fidelity.mamba(num_hidden_layers=2)
    found = adjcomp.explain(model, seq_len=128)
    assert found.layer_count == 2
    assert [state.op for state in found.groups[1].states] == ["causal_conv1d", "selective_scan"]
    assert found.border_bytes == 2 * (3 * 64 * 4 + 64 * 8 * 4)
    assert "loss: () float32" in found.outputs
    assert "logits: not made, as a loss is returned" in found.outputs
