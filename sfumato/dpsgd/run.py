"""DP-SGD for a denoiser.

Each step draws images, sums their clipped gradients, adds noise and takes an Adam step. A `Charge`
draws the images and adds the noise, so no step uses the noise multiplier or the sample rate.

Source: Abadi et al. 2016 for the step; Dockhorn et al. 2023 (DPDM) for the K draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from sfumato.data.images import to_device
from sfumato.diffusion.denoiser import Denoiser
from sfumato.diffusion.ema import EMA
from sfumato.dpsgd.clip import unflatten
from sfumato.dpsgd.gradients import Draws, Microbatch, clipped_gradient_sum, draw, number_of_weights
from sfumato.dpsgd.microbatch import choose_microbatch
from sfumato.errors import ConfigError
from sfumato.privacy.accountant import epsilon_and_order, rdp_curve
from sfumato.privacy.events import Mechanism
from sfumato.privacy.noise import secret_generator
from sfumato.privacy.resume import make_durable, resume
from sfumato.runtime import distributed
from sfumato.runtime.compute import fast_bfloat16
from sfumato.runtime.progress import Progress, Say, discard, no_progress
from sfumato.settings.dpsgd import Saliency, StepSettings
from sfumato.storage.files import write_csv

if TYPE_CHECKING:
    from sfumato.privacy.charge import Charge

ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")  # torch's names, which checkpoints use too


class Trained:
    """Weights trained by Adam, their moving average, and Adam's moments."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        self.parameters = dict(parameters)
        self.ema = EMA(self.parameters)
        self.optimiser = torch.optim.Adam(self.parameters.values(), lr=learning_rate, betas=betas)

    @property
    def steps(self) -> int:
        return self.ema.steps

    def descend(self, gradient: Tensor) -> None:
        """Take one step of Adam against `gradient`, (P,), and update the moving average."""
        for name, part in unflatten(gradient, self.parameters).items():
            self.parameters[name].grad = part
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.ema.update(self.parameters)

    def moments(self) -> dict[str, Tensor]:
        """Return the weights' moving average and Adam's moments.

        Returns tensors by names such as `exp_avg.conv_in.weight`.
        """
        tensors = {}
        for name, value in self.parameters.items():
            state = self.optimiser.state.get(value) or {"step": torch.tensor(0.0)}
            tensors[f"ema.{name}"] = self.ema.average[name]
            tensors |= {
                f"{key}.{name}": state.get(key, torch.zeros_like(value)) for key in ADAM_STATE
            }
        return tensors

    @torch.no_grad()
    def load_moments(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Restore the weights' moving average and Adam's moments.

        tensors: result of `moments` after `steps` steps.
        """
        for name, value in self.parameters.items():
            self.ema.average[name].copy_(tensors[f"ema.{name}"])
            adam = {key: tensors[f"{key}.{name}"].clone() for key in ADAM_STATE}
            self.optimiser.state[value] = {
                key: part if key == "step" else part.to(value) for key, part in adam.items()
            }
        self.ema.steps = steps


class Gradients:
    """Settings of a query's gradients: weights, draws per image, clip norm, and microbatch size.

    Noise levels, noise and the choice of labels to hide are drawn from a secret generator. With a
    public seed, the noise at each position of a batch would be known. A missing image would then
    move all later images to other positions, and so change their gradients too. Create this object
    before a charge opens.

    parameters: trained parameters of `model`, by name;
    config: settings of the stage, including the number of draws per image;
    public_batch: public expected size of a draw (the sample rate times the public number of
    images), never a realised count;
    autocast: whether to run the network in bfloat16; by default, the result of `fast_bfloat16`;
    generator: only for tests.
    """

    def __init__(
        self,
        model: Denoiser,
        parameters: Mapping[str, Tensor],
        config: StepSettings | Saliency,
        public_batch: float,
        autocast: bool | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.model = model
        self.parameters = dict(parameters)
        self.config = config
        self.max_norm = config.max_norm if isinstance(config, Saliency) else config.max_grad_norm
        self.public_batch = public_batch
        self.device = next(iter(self.parameters.values())).device
        self.size = number_of_weights(self.parameters)
        self.generator = generator or secret_generator(self.device)
        self.microbatch_size, self.draws_per_pass = choose_microbatch(
            model, self.parameters, config.draws, public_batch, config.microbatch_size
        )
        # Make the models of all processes equal, because an image's gradient must not depend on the
        # process that computes it
        distributed.agree(model.state_dict().values())
        if autocast is None:
            autocast = distributed.broadcast_object(fast_bfloat16(self.device.type))
        self.autocast = autocast

    def draw(self, images: Tensor) -> Draws:
        """Draw the secret randomness of a batch."""
        config = self.config
        return draw(
            self.model,
            images,
            config.draws,
            config.noise_levels,
            self.generator,
            label_dropout=config.label_dropout,
        )


class State(Trained, Gradients):
    """The state of a run between steps: the trained weights, their average, and Adam's moments.

    model: network whose parameters with `requires_grad` are trained, in place;
    public_batch: public expected size of a draw, by which each step divides the gradient sum;
    autocast, generator: see `Gradients`.
    """

    config: StepSettings

    def __init__(
        self,
        model: Denoiser,
        config: StepSettings,
        public_batch: float,
        autocast: bool | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        parameters = {
            name: value for name, value in model.named_parameters() if value.requires_grad
        }
        Trained.__init__(self, parameters, config.learning_rate)
        Gradients.__init__(self, model, parameters, config, public_batch, autocast, generator)

    def tensors(self) -> dict[str, Tensor]:
        """Return copies, on the CPU, of everything that a checkpoint needs, under names such as
        `parameters.conv_in.weight`.
        """
        tensors = {"step": torch.tensor(self.steps), **self.moments()}
        tensors |= {f"parameters.{name}": value for name, value in self.parameters.items()}
        return {name: value.detach().cpu().clone() for name, value in tensors.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state from `tensors`, except for the random generator.

        Raises ValueError if the tensors belong to a different model.
        """
        expected_shapes = {(name, value.shape) for name, value in self.tensors().items()}
        if mismatches := sorted(
            {
                name
                for name, _ in expected_shapes
                ^ {(name, value.shape) for name, value in tensors.items()}
            }
        ):
            examples = ", ".join(mismatches[:5])
            raise ValueError(
                "the checkpoint is for a different model, because the names or shapes of these "
                f"tensors differ: {examples}"
            )
        for name, value in self.parameters.items():
            value.copy_(tensors[f"parameters.{name}"])
        self.load_moments(tensors, int(tensors["step"]))


def step(state: State, charge: Charge) -> dict[str, float]:
    """Make one Poisson draw, one release and one Adam step. Returns a row of the public log."""
    return update(state, charge.release(gradient_sum(state, charge), state.config.max_grad_norm))


def fine_tune(
    state: Any,
    open_charge: Callable[[], Charge],
    *,
    epsilon_after: Callable[[int], float],
    report: Progress = no_progress,
    say: Say = discard,
    stage: str = "finetune",
    one_step: Callable[[Any, Charge], dict[str, float]] | None = None,
) -> tuple[Charge, list[dict]]:
    """Run all steps of a charge; resume an interrupted run after its last durable step.

    A step is durable once the state and the journal are on disk.

    state: a `State`, or another object with `config`, `tensors` and `load`;
    epsilon_after: function from a number of steps to ε, for the log;
    report: function called with (number of durable steps, number of all steps) at the start and
    after each checkpoint;
    one_step: function that makes one draw, one release and one update; by default `step`.

    Returns the charge, with all its steps durable, and the public log, with one row per step. The
    log never contains a loss, a number of images or a time.
    """
    charge, checkpoint, log = resume(open_charge, stage, say)
    if checkpoint is not None:
        state.load(checkpoint)

    report(charge.used, charge.uses)
    while charge.used < charge.uses:
        row = (one_step or step)(state, charge)
        log.append({**row, "epsilon": epsilon_after(charge.used)})

        # Write the state and the journal before anything that depends on the release is shown.
        if charge.used % state.config.checkpoint_every == 0 or charge.used == charge.uses:
            make_durable(charge, state.tensors(), log)
            report(charge.used, charge.uses)
    return charge, log


def gradient_sum(state: Gradients, charge: Charge) -> Tensor:
    """Sum the clipped gradients over one draw of the charge.

    Returns (P,) float64, zeros for an empty draw. The sum is private: publish it only through
    `charge.release`, which adds noise.
    """
    total = torch.zeros(state.size, dtype=torch.float64, device=state.device)
    bound = state.max_norm
    part = Microbatch(state.microbatch_size, state.draws_per_pass, state.autocast)
    model = state.model
    names = state.parameters
    charge.agree(names.values(), part.size, part.draws, part.autocast, model.use_products)
    for images, labels in charge.batches(size=4 * part.size, draws=state.config.draws):
        images, labels = to_device(images, state.device), to_device(labels, state.device)
        draws = state.draw(images)
        total += clipped_gradient_sum(model, names, images, labels, draws, bound, part)
    return total


def update(state: State, noised: Tensor, public: Tensor | None = None) -> dict[str, float]:
    """Take one Adam step on a released sum, (P,). This is post-processing.

    public: gradient on public images, (P,), to add to the released gradient.

    Returns a row of the public log. Raises ConfigError if a weight is not finite after the step.
    """
    gradient = noised.to(next(iter(state.parameters.values()))) / state.public_batch
    state.descend(gradient if public is None else gradient + public)
    weights = get_total_norm(state.parameters.values())
    # Both norms are transferred together, to wait for the GPU only once.
    norm, length = torch.stack([torch.linalg.vector_norm(gradient), weights]).cpu().tolist()
    if not math.isfinite(length):
        raise ConfigError(
            f"the weights are not finite numbers after step {state.steps}, and every run with "
            "these settings would fail in the same way: lower learning_rate or max_grad_norm of "
            "this stage in params.yaml, and run `stage plan`"
        )
    return {
        "step": state.steps,
        "learning_rate": state.config.learning_rate,
        "noised_gradient_norm": norm,
    }


def step_noise(noise_multiplier: float, weights: int, batch: float) -> float:
    """Estimate the norm of one step's noise, in units of the clip norm: σ·√P / batch.

    If this norm exceeds 1, a step is mostly noise, no matter what the images are.

    noise_multiplier: σ; weights: P, the number of trained weights; batch: expected size of a draw.
    """
    return noise_multiplier * math.sqrt(weights) / batch


def epsilon_by_step(mechanism: Mechanism, delta: float | None) -> Callable[[int], float]:
    """Return a function from a number of steps of a mechanism to a bound on ε, for the log.

    The bound comes from Rényi accounting, whatever `privacy.accountant` is, because the other
    accountants are too slow to run for each row of the log.
    """
    per_step = rdp_curve([replace(mechanism, uses=1).event])
    return lambda steps: epsilon_and_order(per_step * steps, delta or 0.0)[0]


def save_log(log: Sequence[Mapping[str, float]], path: Path) -> None:
    columns = {"step": "", "learning_rate": "g", "noised_gradient_norm": ".6g", "epsilon": ".6g"}
    write_csv(path, log, columns)
