# The learner on GPUs. Every file is compared with its hash.
#   docker build -f deploy/images/gpu-learner.Dockerfile -t slipstream:learner .
ARG DEVEL=nvidia/cuda:13.0.2-devel-ubuntu24.04
ARG BASE=nvidia/cuda:13.0.2-base-ubuntu24.04
FROM ${DEVEL} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12-venv python3.12-dev g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/slipstream
ENV PATH=/opt/slipstream/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY deploy/locks/gpu-learner-3.12.txt /build/
RUN pip install --no-deps --require-hashes -r /build/gpu-learner-3.12.txt
# Compiled where it has no wheel for this torch; an hour.
COPY deploy/locks/flash-attn.txt /build/
RUN pip install --no-deps --no-build-isolation --require-hashes -r /build/flash-attn.txt
# It has an older flash_attn.cute in the place of flash-attn-4's, which is put back.
RUN awk '/^[a-z]/ { own = /^flash-attn-4==/ } own' /build/gpu-learner-3.12.txt >/build/flash-attn-4.txt \
    && pip install --no-deps --force-reinstall --require-hashes -r /build/flash-attn-4.txt
COPY . /src
RUN pip install --no-deps --no-build-isolation /src
RUN python3.12 -m venv /bom && /bom/bin/pip install cyclonedx-bom==7.5.0 \
    && /bom/bin/cyclonedx-py environment --output-format JSON \
        --output-file /opt/slipstream/sbom.cdx.json /opt/slipstream/bin/python

FROM ${BASE}
# gcc and the headers of Python: Triton compiles kernels as they are called first.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12-dev gcc libc6-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/* && userdel --remove ubuntu && useradd --uid 1000 --create-home slipstream
COPY --from=build /opt/slipstream /opt/slipstream
ENV PATH=/opt/slipstream/bin:$PATH OMP_NUM_THREADS=1
USER 1000:1000
WORKDIR /home/slipstream
CMD ["start-learner", "--help"]
