"""Low frequencies of images, from the cosine transform, and their products."""

import math

import torch
from torch import Tensor, nn

from sfumato.data.images import Shape


def cosines(size: int) -> Tensor:
    """Return the orthonormal DCT-II, one row per frequency: (size, size) float32."""
    numbers = torch.arange(size).double()
    rows = (math.pi / size * (numbers + 0.5) * numbers[:, None]).cos() * math.sqrt(2 / size)
    rows[0] /= math.sqrt(2)
    return rows.float()


class CosineMoments(nn.Module):
    """Lowest cosine coefficients z of an image, and the products of any two entries of z.

    (B, C, H, W) float32 in [0, 1] -> (B, K) rows of norm at most 1.

    The vector z consists of the lowest coefficients of the orthonormal cosine transform of
    image − ½, divided by R = bound · √(C·H·W). If its norm then exceeds 1, z is scaled to norm 1.

    A row has two parts, weighted by s = `products`. The first is √(1 − s) · z. The second is √s
    times the upper triangle of z zᵀ, with entries off the diagonal multiplied by √2. So the squared
    norm of a row is (1 − s)‖z‖² + s‖z‖⁴.

    frequencies: number of coefficients of brightness;
    contrasts: number of coefficients of each of two colour differences, red − blue and
    green − (red + blue)/2; no effect on grey images;
    bound: see R;
    flip: whether to give an image and its mirror image the same row, by leaving out the entries
    that change their sign when the image is mirrored;
    products: s, the weight of the second part.
    """

    def __init__(
        self,
        shape: Shape,
        frequencies: int,
        contrasts: int,
        bound: float,
        products: float,
        flip: bool,
    ) -> None:
        super().__init__()
        channels, height, width = shape
        self.shape: Shape = (channels, height, width)
        arguments = {
            "frequencies": frequencies,
            "contrasts": contrasts,
            "bound": bound,
            "products": products,
            "flip": flip,
        }
        self.arguments = {"shape": self.shape, **arguments}
        self.products = products
        self.radius = bound * math.sqrt(math.prod(shape))
        mixing = torch.ones(1, 1)
        # Brightness and two colour differences, which are nearly uncorrelated in photographs
        if channels == 3:
            mixing = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 2.0, -1.0]])
        y, x = torch.meshgrid(
            torch.arange(height) / height, torch.arange(width) / width, indexing="ij"
        )
        radius = (y.square() + x.square()).sqrt().flatten()
        order = radius.argsort(stable=True)
        counts = (frequencies, contrasts, contrasts)[:channels]
        chosen = torch.cat(
            [band * len(radius) + order[:count] for band, count in enumerate(counts)]
        )
        # Coefficients that change their sign if the image is mirrored
        odd = (chosen % width) % 2 == 1
        even = torch.ones_like(odd)
        upper = torch.ones(len(chosen), len(chosen), dtype=torch.bool).triu()
        if flip:
            upper &= odd[:, None] == odd
            even = ~odd
        # Transforms along the height and along the width
        self.rows = nn.Buffer(cosines(height), persistent=False)
        self.columns = nn.Buffer(cosines(width), persistent=False)
        self.mixing = nn.Buffer(mixing / mixing.norm(dim=1)[:, None], persistent=False)
        # Frequency of each coefficient of brightness, and of each colour difference, in half waves
        # per pixel
        self.radius_of = nn.Buffer(radius, persistent=False)
        self.chosen = nn.Buffer(chosen, persistent=False)
        self.even = nn.Buffer(even.nonzero().flatten(), persistent=False)
        self.upper = nn.Buffer(upper.nonzero().T, persistent=False)
        self.size = len(self.even) + self.upper.shape[1]

    def coefficients(self, images: Tensor) -> Tensor:
        """Compute the full transform of image − ½: (B, C, H, W) -> (B, C·H·W), brightness first."""
        bands = torch.einsum("oc,nchw->nohw", self.mixing, images - 0.5)
        return (self.rows @ bands @ self.columns.T).flatten(1)

    def images(self, coefficients: Tensor) -> Tensor:
        """Invert `coefficients`: (B, C·H·W) -> (B, C, H, W)."""
        bands = self.rows.T @ coefficients.unflatten(1, self.shape) @ self.columns
        return torch.einsum("oc,nohw->nchw", self.mixing, bands) + 0.5

    def forward(self, images: Tensor) -> Tensor:
        z = self.coefficients(images)[:, self.chosen] / self.radius
        z = z / torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp(min=1)
        first, second = self.upper
        doubled = torch.where(first == second, 1.0, math.sqrt(2))
        products = z[:, first] * z[:, second] * doubled
        return torch.cat(
            [math.sqrt(1 - self.products) * z[:, self.even], math.sqrt(self.products) * products],
            dim=1,
        )

    def moments(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Recover R times the mean of z, and R² times the mean of z zᵀ, from means of rows.

        (M, K) -> (M, d), (M, d, d), for M classes and d entries of z. Entries that rows leave out
        because of `flip` are set to zero, which is their mean over all images and their mirror
        images.
        """
        size = len(self.chosen)
        means = rows.new_zeros(len(rows), size)
        seconds = rows.new_zeros(len(rows), size, size)
        linear, products = rows.split([len(self.even), self.upper.shape[1]], dim=1)
        means[:, self.even] = linear / math.sqrt(1 - self.products) * self.radius
        first, second = self.upper
        doubled = torch.where(first == second, 1.0, math.sqrt(2))
        seconds[:, first, second] = products / doubled / math.sqrt(self.products) * self.radius**2
        return means, seconds + seconds.transpose(1, 2).tril(-1)
