"""The libraries that people train with, run for real on tiny models: the same weights come out as with the plain model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fidelity
import pytest
import torch
from torch import Tensor, nn

import adjcomp

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
IDS = fidelity.tokens(8, 24)


class Rows(torch.utils.data.Dataset):
    """Rows of IDS as a trainer takes them."""

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": IDS[i], "labels": IDS[i]}


def weights_after(model: nn.Module, train: Callable[[nn.Module], object]) -> dict[str, Tensor]:
    """Changes of the weights of `model` by a training run; the model is as before afterwards."""
    before = copy.deepcopy(model.state_dict())
    train(model)
    after = {name: value.detach() - before[name] for name, value in model.state_dict().items()}
    model.load_state_dict(before)
    return after


def assert_same_training(model: nn.Module, train: Callable[[nn.Module], object], bound: float = 1e-3) -> None:
    """The compiled view changes the weights as the plain model does. The bound is on all of them together."""
    plain = weights_after(model, train)
    ours = weights_after(model, lambda m: train(adjcomp.compile(m, chunk=9)))
    difference = sum(float((ours[n] - plain[n]).float().square().sum()) for n in plain) ** 0.5
    norm = sum(float(plain[n].float().square().sum()) for n in plain) ** 0.5
    assert norm > 0
    assert difference <= bound * norm


def run_trainer(model: nn.Module, folder: Path, **options: Any) -> Any:
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        optim="sgd",
        learning_rate=0.1,
        **options,
    )
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=Rows(), eval_dataset=Rows())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return trainer


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_with_accumulation(tmp_path: Path, bf16: bool) -> None:
    """Given transformers' Trainer with accumulation, clipping and, at will, bf16, then training is plain's."""
    model = fidelity.mamba(num_hidden_layers=2)
    assert_same_training(model, lambda m: run_trainer(m, tmp_path, bf16=bf16), 0.02 if bf16 else 1e-4)


def test_trainer_evaluates_without_logits(tmp_path: Path) -> None:
    """Given Trainer.evaluate, when predictions are not asked for or asked for, then the loss is plain's and nothing breaks."""
    model = fidelity.mamba2(num_hidden_layers=2)
    plain = run_trainer(model, tmp_path).evaluate()["eval_loss"]
    trainer = run_trainer(fidelity.mamba2(num_hidden_layers=2), tmp_path)
    trainer.model = adjcomp.compile(trainer.model, chunk=10)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain, rel=1e-4)
    assert trainer.predict(Rows()).metrics["test_loss"] == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_prepares_a_view(precision: str) -> None:
    """Given Accelerate, which wraps `forward`, then training is plain's, and the original keeps its own forward."""
    model = fidelity.mamba(num_hidden_layers=2)

    def train(run: nn.Module) -> None:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # it keeps the precision of the process's first
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        optimizer = torch.optim.SGD(run.parameters(), 0.1)
        prepared, stepper = accelerator.prepare(run, optimizer)
        for batch in IDS.split(4):
            loss = prepared(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            stepper.step()
            stepper.zero_grad()
        accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)

    assert_same_training(model, train, 1e-4 if precision == "no" else 0.02)
    view = adjcomp.compile(model)
    view.forward = lambda *_, **__: "assigned"
    assert view.forward() == "assigned"
    assert model(input_ids=IDS).logits is not None
    del view.forward
    assert view(input_ids=IDS, labels=IDS).logits is None


def test_peft_adapters_train_and_are_saved(tmp_path: Path) -> None:
    """Given LoRA on in_proj and x_proj, when a view of it trains, then the adapters change as plain's and can be saved."""
    peft = pytest.importorskip("peft")
    model = fidelity.mamba(num_hidden_layers=2)
    config = peft.LoraConfig(r=4, target_modules=["in_proj", "x_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)

    def train(run: nn.Module) -> None:
        optimizer = torch.optim.SGD([p for p in run.parameters() if p.requires_grad], 0.1)
        for batch in IDS.split(4):
            run(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_same_training(adapted, train, 1e-4)
    adjcomp.compile(adapted).save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_checkpoints_make_the_round_trip(tmp_path: Path) -> None:
    """Given a view, when it is saved by save_pretrained and loaded by its class, then the weights and the class are the same."""
    model = fidelity.mamba(num_hidden_layers=1)
    adjcomp.compile(model).save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.architectures == ["MambaForCausalLM"]
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_torch_compile_around_a_call() -> None:
    """Given torch.compile on the code around a compiled model, then the call is left to its plan and gradients are plain's."""
    model = fidelity.diagonal_stack(layers=1)
    view = adjcomp.compile(model, chunk=5)
    ids = fidelity.tokens(2, 12, vocab=31)

    def around(run: nn.Module) -> Tensor:
        return (run(ids) * 2).square().mean()

    compiled = torch.compile(around, backend="eager")
    assert (
        fidelity.distance(fidelity.measure(model, lambda: compiled(view)), fidelity.measure(model, lambda: around(model))) <= 1e-5
    )
    assert view.plan is not None
