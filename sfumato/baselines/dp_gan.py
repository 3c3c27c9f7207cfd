"""DP-GAN: a discriminator by DP-SGD on the sensitive images, and a generator that sees the discriminator alone.

A step releases the clipped sum of the discriminator's gradients on one draw of *real* images, as a step of `finetune`
does; Δ is the clip. The other half of its loss is on generated images. They follow from weights that were released, and
so does their gradient, whatever its norm: it is added after the noise, at no cost. The generator then descends on what
the noisy discriminator says of its images, which is post-processing too.
Source: Xie et al. 2018; Torkzadehmahani et al. 2019 for the two halves clipped apart; Bie et al. 2023.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sfumato.baselines.discriminator import Discriminator
from sfumato.diffusion.ema import EMA, ema_model
from sfumato.dpsgd.gradients import clipped_gradient_sum, draw
from sfumato.dpsgd.run import State
from sfumato.generators.network import Generator
from sfumato.generators.one_step import balanced_labels, settle
from sfumato.settings.baselines import Adversarial

BETAS = (0.5, 0.99)  # of both Adams: no long memory of what the other network was


class AdversarialState(State):
    """What a run carries: as `State`, for the discriminator, with the generator, its average and Adam's moments.

    priors: (classes,) public label shares of generated images; seed: fixes what is generated, which is public, so that
    all processes generate the same.
    """

    model: Discriminator
    config: Adversarial

    def __init__(
        self,
        model: Discriminator,
        generator_network: Generator,
        config: Adversarial,
        priors: Tensor,
        seed: int,
        *,
        public_batch: float,
        autocast: bool | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(
            model, config, public_batch=public_batch, label_dropout=0.0, autocast=autocast, generator=generator
        )
        self.optimiser.param_groups[0]["betas"] = BETAS
        self.network, self.priors, self.seed = generator_network.to(self.device).train(), priors.cpu(), seed
        self.weights = dict(self.network.named_parameters())
        self.average = EMA(self.weights, config.ema)
        self.teaching = torch.optim.Adam(self.weights.values(), lr=config.generator_rate, betas=BETAS)
        self.trained["generator_"] = self.weights, self.average, self.teaching
        self.fakes = copy.copy(model)  # the same weights, asked for the opposite
        self.fakes.target = -1

    def generated(self, purpose: int) -> tuple[Tensor, Tensor, torch.Generator]:
        """Images of this step, (fakes, C, H, W), their labels, and the public randomness that goes on from there."""
        random = torch.Generator().manual_seed((self.seed << 31) + 2 * self.steps + purpose)
        labels = balanced_labels(self.config.fakes, self.priors, self.model.classes, random)
        z = torch.randn(self.config.fakes, self.network.latent, generator=random)
        return self.network(z.to(self.device), labels.to(self.device)), labels.to(self.device), random

    @torch.no_grad()
    def completed(self, gradient: Tensor) -> Tensor:
        """The released mean over real images, (P,), plus the clipped mean over generated ones: post-processing.

        Generated images are clipped as real ones are, or their half would outweigh the other.
        """
        images, labels, random = self.generated(0)
        config, device = self.config, self.device
        drawn = draw(self.fakes, images.cpu(), 1, config.noise_levels, random)
        drawn = type(drawn)(**{name: value.to(device) for name, value in drawn.tensors().items()})
        bound = config.max_grad_norm
        half = clipped_gradient_sum(self.fakes, self.parameters, images, labels, drawn, bound, self.chunk)
        return gradient + half / len(images)

    def follow(self) -> None:
        """A step of the generator: its images shall be taken for real by the released discriminator."""
        if self.steps % self.config.every:
            return
        images, labels, random = self.generated(1)
        levels = self.model.draw_levels(self.config.noise_levels, len(images), random).to(self.device)
        noise = torch.randn(images.shape, generator=random).to(self.device)
        loss = self.model.per_image_loss(self.model, images, labels, levels, noise).mean()
        gradients = torch.autograd.grad(loss, list(self.weights.values()))
        for value, part in zip(self.weights.values(), gradients, strict=True):
            value.grad = part
        self.teaching.step()
        self.teaching.zero_grad(set_to_none=True)
        self.average.update(self.weights)

    def tensors(self) -> dict[str, Tensor]:
        own = {f"generator.{name}": value.cpu().clone() for name, value in self.network.state_dict().items()}
        return super().tensors() | own | {"generator_steps": torch.tensor(self.average.steps)}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        super().load(tensors)
        for name, value in self.network.state_dict().items():
            value.copy_(tensors[f"generator.{name}"])
        self.average.steps = int(tensors["generator_steps"])

    def result(self) -> Generator:
        """The generator with the average of its weights, and the statistics of its normalisations computed anew."""
        found: nn.Module = ema_model(copy.deepcopy(self.network), self.average.average)
        assert isinstance(found, Generator)
        settle(found, self.config.fakes, self.priors, torch.Generator().manual_seed(self.seed))
        return found.eval()
