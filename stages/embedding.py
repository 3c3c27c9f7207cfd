"""`stage embedding`: release a noisy joint Fourier embedding of features learned from earlier releases."""

from sfumato.data.images import load_images
from sfumato.features.teacher_network import load_teacher
from sfumato.queries.feature_means import LENGTH_SCALES, TEACHER, learned_features, train_feature_network
from sfumato.runtime import distributed
from sfumato.runtime.compute import device
from sfumato.settings.queries import Embedding
from stages.feature_means import release_means
from stages.runner import QueryRun
from stages.screen import progress


def embedding(run: QueryRun, settings: Embedding) -> None:
    plan = run.plan
    teacher = load_teacher(run.path("teacher")).to(device())
    images = load_images(run.path("auxiliary"), plan.classes, shape=plan.shape)
    with progress("network of the features", clock=False) as report:
        network = train_feature_network(images, teacher, settings.learned.steps, plan.seed, report)
    distributed.agree(network.state_dict().values())
    features = learned_features(teacher.features, network, settings.size, plan.seed)
    released = f"joint embedding: {settings.size} Fourier features, learned on what was released, by class"
    about = {"seed": plan.seed, "size": settings.size, "length_scales": LENGTH_SCALES, "teacher": TEACHER}
    cache = {"teacher": teacher.features.config(), "network": network.config()}
    release_means(run, features, released, about, cache=cache, network=network)
