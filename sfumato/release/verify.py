"""Verify the files of this folder, and the privacy cost that its ledger states.

    python verify.py [--manifest SHA256] [FOLDER]

SHA256 is the hash of manifest.json. The sender gave you the hash separately. By default, FOLDER is
the folder of this file. Each check prints a line that begins with `ok`, `note` (not checked here)
or `FAIL`. After a `FAIL`, the exit code is 1. This program needs Python 3.8 or newer. It imports
only the standard library, opens no network connection and writes no file. The checks:

1. The folder contains exactly the files that manifest.json lists, each with its size and SHA-256.
2. The archives contain exactly the pictures that labels.csv names: PNGs of the size in card.json.
3. The labels and kinds in labels.csv match card.json.
4. ledger.json has the digest that it states, and all its mechanisms add Gaussian noise.
5. The stated epsilon agrees with a bound by Renyi differential privacy (Mironov, Talwar and Zhang
   2019, section 3.3; conversion: Canonne, Kamath and Steinke 2020, proposition 12). If every
   mechanism uses all images, it is also compared with the exact epsilon (Balle and Wang 2018,
   theorem 8; Dong, Roth and Su 2022, corollary 2).
"""

import argparse
import csv
import hashlib
import json
import math
import sys
import zipfile
from collections import Counter
from pathlib import Path

MANIFEST = "manifest.json"
PNG_START = b"\x89PNG\r\n\x1a\n"
PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
SECRET_NOISE = "os-entropy, AES counter"
TOLERANCE = 1e-6  # Relative difference between stated and computed epsilon
RENYI_ORDERS = [
    *(1 + x / 20 for x in range(1, 60)),
    *(4 + x / 4 for x in range(24)),
    *range(10, 64),
    *range(64, 128, 4),
    *range(128, 256, 16),
    *range(256, 1025, 64),
    *(1536, 2048, 3072, 4096),
]


def check_files(folder, sent=None):
    """Check the manifest and each file. Yield (passed, text); passed is None for a note."""
    manifest = content_of(folder / MANIFEST)
    sha256 = sha256_of(folder / MANIFEST)
    if sent is None:
        yield None, f"{MANIFEST}: SHA-256 {sha256}. Compare it with the hash that you were sent"
    else:
        yield sha256 == sent, f"{MANIFEST}: SHA-256 {sha256}, expected {sent} (--manifest)"
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    unchanged = text.encode() == (folder / MANIFEST).read_bytes()
    yield unchanged, f"{MANIFEST}: must be JSON with sorted keys, indented by one space"
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    present = {path.relative_to(folder).as_posix() for path in paths} - {MANIFEST}
    for name in sorted(present - manifest.keys()):
        yield False, f"{name}: not listed in {MANIFEST}"
    for name, file in sorted(manifest.items()):
        path = folder / name
        if name not in present:
            yield False, f"{name}: missing"
        elif path.stat().st_size != file["bytes"]:
            yield False, f"{name}: {path.stat().st_size} bytes, {MANIFEST} lists {file['bytes']}"
        else:
            same = sha256_of(path) == file["sha256"]
            yield same, f"{name}: SHA-256 {('differs from', 'as in')[same]} {MANIFEST}"


def sha256_of(path):
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(2**20), b""):
            digest.update(block)
    return digest.hexdigest()


def content_of(path):
    return json.loads(path.read_text(encoding="utf-8"))


def check_pictures(folder):
    """Compare the pictures in the archives, and their labels and kinds, with card.json."""
    card = content_of(folder / "card.json")
    size = card["shape"][1:]
    names = []
    odd = []
    for path in sorted(folder.glob("images-*.zip")):
        with zipfile.ZipFile(path) as archive:
            names += archive.namelist()
            odd += [name for name in archive.namelist() if png_size(archive.read(name)) != size]
    with (folder / "labels.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    counts = f"{len(names)} in archives, {len(rows)} in labels.csv, {card['images']} in card.json"
    table_names = sorted(row["file_name"] for row in rows)
    same = sorted(names) == table_names and len(set(names)) == len(names) == card["images"]
    yield same, f"pictures: {counts}"
    yield not odd, f"pictures: {len(odd)} are not PNGs of {size[1]} x {size[0]} pixels"
    kinds = dict(Counter(row["kind"] for row in rows))
    yield kinds == card["kinds"], f"labels.csv: kinds {kinds}, card.json states {card['kinds']}"
    wrong_labels = [row["file_name"] for row in rows if not has_valid_label(row, card["classes"])]
    yield not wrong_labels, f"labels.csv: {len(wrong_labels)} labels do not fit card.json"


def png_size(content):
    """Return [height, width], or None if the content does not begin and end like a PNG."""
    if not (content.startswith(PNG_START) and content.endswith(PNG_END)):
        return None
    return [int.from_bytes(content[20:24], "big"), int.from_bytes(content[16:20], "big")]


def has_valid_label(row, classes):
    if "class" not in row:  # several labels per image: one column per label, with 0 or 1
        return all(row[f"label {name}"] in ("0", "1") for name in classes)
    name = classes[int(row["label"])]  # labels.csv puts an apostrophe before a formula
    return row["label"].isdecimal() and row["class"] in (name, f"'{name}")


def check_ledger(folder):
    """Check the ledger, and compare its epsilon with the recomputed value."""
    ledger = content_of(folder / "ledger.json")
    content = {key: value for key, value in ledger.items() if key != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    same = hashlib.sha256(text.encode()).hexdigest() == ledger["digest"]
    yield same, "ledger.json: its digest must match its content"
    for record in ledger["records"]:
        sigma, rate, uses = mechanism_of(record["event"])
        noise = record["noise_source"]
        numbers = f"sigma {sigma:g}, sample rate {rate:g}, {uses} release(s), noise from {noise!r}"
        name = f"mechanism {record['id'][:8]} ({record['stage']})"
        yield noise == SECRET_NOISE, f"{name}: {numbers}, expected {SECRET_NOISE!r}"
    units = sorted({record["unit"] for record in ledger["records"]})
    yield len(units) <= 1, f"ledger.json: at most one privacy unit, found {'; '.join(units)}"
    size = ledger["size_hint"]
    yield 0 < ledger["delta"] <= 1 / size, f"delta: {ledger['delta']:g}, expected at most 1/{size}"
    yield from check_epsilon(ledger, content_of(folder / "card.json"))
    odometer = ledger["odometer"]
    text = f"{odometer['charges']} charge(s) on {odometer['dataset_id']!r}, none may be missing"
    if datasets := ", ".join(ledger.get("apart", ())):
        yield None, f"odometer: all charges on {datasets} are listed only in their owners' ledgers"
    else:
        yield odometer["complete"], f"odometer: {text}"


def check_epsilon(ledger, card):
    delta = ledger["delta"]
    epsilons = ledger["epsilon"]
    accountant = ledger["accountant"]
    disjoint_sets = ledger.get("apart") or [None]  # no person is in two sets: use the largest
    groups = [mechanisms_of(ledger, {*disjoint_sets} - {name}) for name in disjoint_sets]
    bound = max(renyi_epsilon(parts, delta) for parts in groups)
    text = f"epsilon: at most {bound:.6f} (Renyi) at delta {delta:g}, ledger.json states"
    yield is_close(bound, epsilons["rdp"]), f"{text} {epsilons['rdp']:.6f}"
    value = epsilons[accountant]
    if bound and all(rate == 1 for parts in groups for _, rate, _ in parts):
        exact = max(exact_epsilon(parts, delta) for parts in groups)
        text = f"epsilon: exactly {exact:.6f}, ledger.json states {value:.6f} ({accountant})"
        yield exact <= value * (1 + TOLERANCE), text
    elif value < bound * (1 - TOLERANCE):
        text = f"epsilon: ledger.json states {value:.6f} ({accountant}). That method is tighter"
        yield None, f"{text}, but not part of this program. Proven here: at most {bound:.6f}"
    target = ledger["target"]
    yield value <= target * (1 + TOLERANCE), f"epsilon: must not exceed the budget {target:g}"
    # With the accountant pld, version 0.3 wrote the Renyi bound into the card: accept either
    same = any(is_close(card["epsilon"], epsilons[name]) for name in (accountant, "rdp"))
    text = f"card.json: epsilon {card['epsilon']:.6f} at delta {card['delta']:g}"
    yield same and card["delta"] == delta, f"{text}, ledger.json states {value:.6f} at {delta:g}"


def is_close(computed, stated):
    return abs(computed - stated) <= TOLERANCE * max(1, stated)


def mechanisms_of(ledger, excluded_ids):
    records = [record for record in ledger["records"] if record["dataset_id"] not in excluded_ids]
    return [mechanism_of(record["event"]) for record in records]


def mechanism_of(event):
    """Return (noise multiplier, sample rate, releases) of Gaussian noise, or raise ValueError."""
    problem = ValueError(f"expected a valid Gaussian mechanism, found {event}")
    uses = 1
    rate = 1.0
    if event["type"] == "SelfComposed":
        uses = event["count"]
        event = event["event"]
    if event["type"] == "PoissonSampled":
        rate = event["sampling_probability"]
        event = event["event"]
    if event.keys() != {"type", "noise_multiplier"} or event["type"] != "Gaussian":
        raise problem
    sigma = event["noise_multiplier"]
    if not (1e-100 <= sigma <= 1e100 and 0 < rate <= 1 and type(uses) is int and uses >= 1):
        raise problem
    return sigma, rate, uses


def exact_epsilon(parts, delta):
    """Return epsilon of all mechanisms together, rounded up. Each must draw all images."""
    mu = math.sqrt(math.fsum(uses / sigma**2 for sigma, _, uses in parts))
    low = 0.0
    high = renyi_epsilon(parts, delta)
    for _ in range(100):
        middle = (low + high) / 2
        if gaussian_delta(mu, middle) > delta:
            low = middle
        else:
            high = middle
    return high + 1e-11


def gaussian_delta(mu, epsilon):
    """Return delta of a Gaussian mechanism at `epsilon`. mu: sensitivity / standard deviation."""
    tail = math.exp(epsilon + log_normal_cdf(-mu / 2 - epsilon / mu))
    return math.exp(log_normal_cdf(mu / 2 - epsilon / mu)) - tail


def log_normal_cdf(x):
    """Return the logarithm of the normal distribution function or, if x <= -35, an upper bound."""
    if x > -35:
        return math.log(math.erfc(-x / math.sqrt(2)) / 2)
    return -x * x / 2 - math.log(-x * math.sqrt(2 * math.pi))


def renyi_epsilon(parts, delta):
    """Return an upper bound on epsilon: the smallest of the bounds at RENYI_ORDERS."""
    if not parts:
        return 0.0
    return max(0.0, min(epsilon_at(order, parts, delta) for order in RENYI_ORDERS))


def epsilon_at(order, parts, delta):
    divergence = sum(uses * renyi_divergence(sigma, rate, order) for sigma, rate, uses in parts)
    return divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


def renyi_divergence(sigma, rate, order):
    """Return the Renyi divergence of one release of Gaussian noise on a Poisson sample."""
    if rate == 1:
        return order / (2 * sigma**2)
    if order == int(order):
        terms = [log_term(order, k, sigma, rate) for k in range(int(order) + 1)]
        return log_sum(terms) / (order - 1)
    # One infinite series gives the integral below z, and another gives the integral above z.
    z = sigma**2 * math.log(1 / rate - 1) + 0.5
    total = -math.inf
    previous = (-math.inf, -math.inf)
    for k in range(1000):
        below = log_term(order, k, sigma, rate) + log_normal_cdf((z - k) / sigma)
        above = log_term(order, order - k, sigma, rate) + log_normal_cdf((order - k - z) / sigma)
        total = log_sum([total, below, above])
        if below < previous[0] and above < previous[1] and max(below, above) < total - 30:
            return total / (order - 1)
        previous = (below, above)
    return math.inf  # the series did not converge: another order gives the bound


def log_term(order, k, sigma, rate):
    """Return log |C(order, k) (1 - rate)^(order - k) rate^k exp((k^2 - k) / (2 sigma^2))|."""
    binomial = math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
    weight = (order - k) * math.log1p(-rate) + k * math.log(rate)
    return binomial + weight + (k * k - k) / (2 * sigma**2)


def log_sum(logarithms):
    """Return the logarithm of a sum of numbers, which are given by their logarithms."""
    largest = max(logarithms)
    return largest + math.log(math.fsum(math.exp(x - largest) for x in logarithms))


def results_of(folder, sent=None):
    results = []
    for check in (check_files(folder, sent), check_pictures(folder), check_ledger(folder)):
        try:
            results.extend(check)
        except Exception as error:  # a damaged file can raise any exception
            results.append((False, f"{check.__name__}: {type(error).__name__}: {error}"))
    return results


def main():
    parser = argparse.ArgumentParser(usage="python verify.py [--manifest SHA256] [FOLDER]")
    parser.add_argument("--manifest", type=lambda sent: sent.strip().lower())
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parent)
    options = parser.parse_args()
    if hasattr(sys.stdout, "reconfigure"):  # IDLE and notebooks, which lack it, show any name
        sys.stdout.reconfigure(errors="backslashreplace")  # some terminals cannot show every name
    failures = 0
    for passed, text in results_of(options.folder, options.manifest):
        print({True: "ok  ", None: "note", False: "FAIL"}[passed], text)
        failures += passed is False
    print(f"{failures} check(s) failed")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
