# One image for every process of every cluster: chief, worker, parameter server, one machine.
#
#     docker build -t tfdist .
#     docker run tfdist --config configs/digits-single.yaml
#
# For GPUs (TensorFlow's packages bring CUDA; the host needs NVIDIA's driver alone):
#
#     docker build -t tfdist-gpu --build-arg EXTRAS=gpu,experiments .
#
# On an image that brings Python, TensorFlow and TensorBoard itself, name it with BASE_IMAGE;
# EXTRAS=experiments is then enough. docs/image.md says what has been tried. Tests:
# tests/trainer/test_dockerfile.py runs these steps in a clean virtual environment, and
# tests/trainer/test_image.py (-m slow) builds the image with buildah and trains in it.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}

# Extras of setup.cfg to install.
ARG EXTRAS=cpu,experiments

LABEL org.opencontainers.image.title="tfdist" \
      org.opencontainers.image.description="Trains one tfdist experiment; the same image in every pool" \
      org.opencontainers.image.licenses="Apache-2.0"

# Log lines leave when they are written; no .pyc files in layers; no pip cache in layers. Debian
# marks its Python as not for pip, but an image has no other user of it.
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# Where Google's machines with GPUs, and NVIDIA's container runtime, put the driver and its tools.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Dependencies first: this layer is built again only when setup.cfg changes, not with the code.
# What is installed here under the name of tfdist is empty but for its metadata.
WORKDIR /opt/tfdist
COPY setup.cfg pyproject.toml ./
COPY tfdist/_version.py tfdist/_version.py
RUN touch README.md && \
    python -m pip install ".[${EXTRAS}]"

COPY tfdist tfdist
COPY trainer trainer
COPY README.md ./
RUN python -m pip install --no-deps --force-reinstall .

# Runs as a user of its own, in a directory it can write to: runs/ and data sets go there.
RUN useradd --create-home --uid 10001 trainer && \
    install --directory --owner=trainer /workspace
ENV TFDS_DATA_DIR=/workspace/data
WORKDIR /workspace
COPY configs configs
USER trainer

ENTRYPOINT ["python", "-m", "trainer.task"]
