# The image of the tasks without a GPU: data-server, reward-server, replay-buffer and environment-server. It has their
# packages and the sandbox, and no code: SkyPilot copies that into the pod, where `jobgroup/setup.sh` adds our package.
# So it is built again when constraints.txt changes. docs/how-to/clusters.md#images
#
#   docker build --tag $IMAGE . && docker push $IMAGE
FROM python:3.11-slim-bookworm

# bubblewrap and libseccomp2 are the sandbox. SkyPilot would install the others whenever a pod starts.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        bubblewrap libseccomp2 \
        ca-certificates curl gcc netcat-openbsd openssh-server patch pciutils procps rsync sudo wget \
    && rm -rf /var/lib/apt/lists/*

# Installs what our package needs, and the package only for as long as that takes. hatchling builds it in the pod.
WORKDIR /opt/rlhf-math
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN pip install --no-cache-dir --constraint constraints.txt --editable '.[services]' hatchling transformers \
    && pip uninstall --yes rlhf-math

# SkyPilot needs sudo without a password; the tasks themselves run as this user.
RUN useradd --uid 1000 --create-home --shell /bin/bash sky \
    && echo 'sky ALL=(ALL) NOPASSWD:ALL' > /etc/sudoers.d/sky
USER 1000
WORKDIR /home/sky
