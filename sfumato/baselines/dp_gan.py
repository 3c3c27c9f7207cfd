"""DP-GAN: a discriminator trained by DP-SGD, and a generator trained against it.

Each step releases the sum of the discriminator's clipped gradients for one draw of *real* images,
as a step of `finetune` does. The sensitivity of the sum is the clipping bound. The discriminator's
loss has a second half, on *generated* images. These depend only on released weights, so their
gradient is added after the noise, at no cost. Then the generator takes a step that makes the noisy
discriminator classify generated images as real more often. The generator depends on sensitive
images only through this discriminator.

Source: Xie et al. 2018; Torkzadehmahani et al. 2019 for clipping the two halves separately; Bie et
al. 2023.
"""

import copy
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from sfumato.baselines.settings import Adversarial
from sfumato.diffusion.denoiser import Denoiser
from sfumato.diffusion.ema import ema_model
from sfumato.diffusion.objective import to_model_range
from sfumato.dpsgd.gradients import Draws, Microbatch, clipped_gradient_sum, draw
from sfumato.dpsgd.run import State, Trained, gradient_sum, update
from sfumato.generators.network import Generator, half
from sfumato.generators.one_step import balanced_labels, recompute_batch_norm
from sfumato.privacy.charge import Charge
from sfumato.settings.fields import Size, both_sides, size_of


class Discriminator(Denoiser):
    """Network that computes the logit of "this image is real", for noisy images and their labels.

    It consists of convolutions, a linear head and a projection for each label. It has the interface
    of a denoiser, because DP-SGD needs `per_image_loss`. There is no batch normalisation, so no
    image affects another.

    target: 1 if `per_image_loss` is for real images, -1 if it is for generated images.
    """

    supports_ghost_layers = True
    target = 1

    def __init__(self, resolution: Size, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.resolution = size_of(resolution)
        self.channels = channels
        self.classes = classes
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.LeakyReLU(0.2)]
        sides = both_sides(resolution)
        inputs = width
        while math.prod(sides) > 4**2:  # reduce to at most 4×4 cells
            outputs = min(2 * inputs, 4 * width)  # the width is at most 4 times the first width
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.LeakyReLU(0.2)]
            sides = half(sides)
            inputs = outputs
        self.body = nn.Sequential(*layers)
        cells = inputs * math.prod(sides)
        self.head = nn.Linear(cells, 1)
        self.by_label = nn.Embedding(classes + 1, cells)
        nn.init.zeros_(self.by_label.weight)

    def forward(self, x: Tensor, levels: Tensor, labels: Tensor) -> Tensor:
        """Compute logits, (B,).

        x: (B, C, H, W), noisy images, with values in about [-1, 1];
        levels: (B,), not used;
        labels: (B,); the value `classes` means no label.
        """
        hidden = self.body(x).flatten(1)
        return self.head(hidden).squeeze(1) + (self.by_label(labels) * hidden).sum(1)

    def per_image_loss(
        self, images: Tensor, labels: Tensor, levels: Tensor, noise: Tensor
    ) -> Tensor:
        """Compute ln(1 + exp(−target · logit)) of each image, (B,). Shapes as in `Denoiser`."""
        noisy = to_model_range(images) + levels[:, None, None, None] * noise
        return F.softplus(-self.target * self(noisy, levels, labels).float())


class AdversarialState:
    """State of a run of DP-GAN.

    It consists of the discriminator, which DP-SGD trains, and the generator, with the average of
    the generator's weights and the moments of its optimiser.

    priors: (classes,), public share of each class among generated images;
    seed: seed of the random numbers for the generated images;
    judge: state of the discriminator's training;
    network: the generator;
    config: settings of DP-GAN.
    """

    def __init__(
        self, judge: State, network: Generator, config: Adversarial, priors: Tensor, seed: int
    ) -> None:
        model = judge.model
        assert isinstance(model, Discriminator)
        self.judge = judge
        self.judge.optimiser.param_groups[0]["betas"] = config.betas
        self.config = config
        self.model = model
        self.device = self.judge.device
        self.network = network.to(self.device).train()
        self.priors = priors.cpu()
        self.seed = seed
        self.pupil = Trained(dict(network.named_parameters()), config.generator_rate, config.betas)
        # The same network with the same weights, but with the loss for generated images
        self.against = copy.copy(model)
        self.against.target = -1

    def generate_batch(self, purpose: int) -> tuple[Tensor, Tensor, Draws]:
        """Generate images for one step.

        Returns the images, of shape (`fakes`, C, H, W), their labels, and the random numbers
        for the loss on these images. All randomness is public.

        purpose: 0 for the discriminator's step, 1 for the generator's.
        """
        random = torch.Generator().manual_seed((self.seed << 31) + 2 * self.judge.steps + purpose)
        labels = balanced_labels(self.config.fakes, self.priors, self.model.classes, random).to(
            self.device
        )
        images = self.network(
            torch.randn(len(labels), self.network.latent, generator=random).to(self.device), labels
        )
        draws = draw(self.model, images.cpu(), 1, self.config.noise_levels, random)
        return (
            images,
            labels,
            Draws(**{name: value.to(self.device) for name, value in vars(draws).items()}),
        )

    def step(self, charge: Charge) -> dict[str, float]:
        """Run one step: draw images, release a noisy gradient, and update both networks.

        Returns a row of the log, which contains only public numbers.
        """
        judge = self.judge
        bound = self.config.max_grad_norm
        released = charge.release(gradient_sum(judge, charge), bound)
        # Gradients for generated images are clipped too.
        # Otherwise, they would outweigh the gradients for real images.
        with torch.no_grad():
            fakes = self.generate_batch(0)
        total = clipped_gradient_sum(
            self.against, judge.parameters, *fakes, bound, Microbatch(judge.microbatch_size)
        )
        row = update(judge, released, total.float() / self.config.fakes)

        # Train the generator to fool the released discriminator.
        images, labels, draws = self.generate_batch(1)
        loss = self.model.per_image_loss(
            images, labels, draws.levels[:, 0], draws.noise[:, 0]
        ).mean()
        self.pupil.descend(
            parameters_to_vector(torch.autograd.grad(loss, [*self.pupil.parameters.values()]))
        )
        return row

    def tensors(self) -> dict[str, Tensor]:
        """Return copies, on the CPU, of everything that a checkpoint needs."""
        tensors = {f"generator.{name}": value for name, value in self.network.state_dict().items()}
        tensors |= {f"generator_{name}": value for name, value in self.pupil.moments().items()}
        tensors["generator_steps"] = torch.tensor(self.pupil.steps)
        return self.judge.tensors() | {
            name: value.detach().cpu().clone() for name, value in tensors.items()
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.judge.load(
            {name: value for name, value in tensors.items() if not name.startswith("generator")}
        )
        for name, value in self.network.state_dict().items():
            value.copy_(tensors[f"generator.{name}"])
        moments = {name: tensors[f"generator_{name}"] for name in self.pupil.moments()}
        self.pupil.load_moments(moments, int(tensors["generator_steps"]))

    def result(self) -> Generator:
        """Return the generator with averaged weights and recomputed normalisation statistics."""
        generator = copy.deepcopy(self.network)
        ema_model(generator, self.pupil.ema.average)
        recompute_batch_norm(
            generator, self.config.fakes, self.priors, torch.Generator().manual_seed(self.seed)
        )
        return generator.eval()
