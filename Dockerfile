# Sfumato on the CPU, without root. What is private lies on the volume /state; the project is mounted at /project.
#
#   docker build -t sfumato .                            the CPU build of PyTorch: no CUDA libraries (several GB)
#   docker build -t sfumato --build-arg TORCH=cu130 .    for a GPU: a name below download.pytorch.org/whl; run with --gpus all
#   --build-arg UID=$(id -u)                             to run as yourself, who owns the mounted project
FROM python:3.11-slim AS build
ARG TORCH=cpu
WORKDIR /src
COPY . .
RUN python -m venv /opt/sfumato \
    && grep -E '^torch(vision)?==' constraints.txt > torch.txt \
    && /opt/sfumato/bin/pip install --no-cache-dir --index-url "https://download.pytorch.org/whl/${TORCH}" -r torch.txt \
    && /opt/sfumato/bin/pip install --no-cache-dir -c constraints.txt '.[dicom,marks,parquet,volumes]'

FROM python:3.11-slim
ARG UID=1000
# hadolint ignore=DL3008  # Debian keeps one version of each only: a pinned one could not be built later
RUN apt-get update \
    && apt-get install -y --no-install-recommends git tini \
    && rm -rf /var/lib/apt/lists/* \
    && git config --system --add safe.directory /project \
    && useradd --uid ${UID} --create-home sfumato \
    && install -d -o sfumato -g sfumato -m 0700 /state /project
COPY --from=build /opt/sfumato /opt/sfumato
ENV PATH=/opt/sfumato/bin:$PATH SFUMATO_STATE=/state DVC_SITE_CACHE_DIR=/state/dvc
# The first process reaps what ended, and passes a stop on to all as Ctrl-C: a stage then ends by itself, and so does DVC.
ENTRYPOINT ["tini", "-s", "-g", "--"]
STOPSIGNAL SIGINT
USER ${UID}
VOLUME /state
WORKDIR /project
CMD ["stage", "--help"]
