# Every role on CPUs: broker and reward workers of any run, and whole runs of small models.
#   docker build -f deploy/images/cpu.Dockerfile --build-arg TORCH_INDEX=URL -t slipstream:cpu .
# TORCH_INDEX is the index of CPU builds of torch and torchvision; all other files are compared with
# their hashes.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
ARG TORCH_INDEX
RUN test -n "$TORCH_INDEX" || { echo "give --build-arg TORCH_INDEX=URL, the index of torch for CPUs"; exit 1; }
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY deploy/locks/cpu-3.11.txt deploy/constraints-cpu.txt deploy/setup/torchvision_operators.py /build/
RUN python -m venv /opt/slipstream
ENV PATH=/opt/slipstream/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN pip install --no-deps --require-hashes -r /build/cpu-3.11.txt
RUN pip install --no-deps --index-url "$TORCH_INDEX" $(grep -E '^torch(vision)?==' /build/constraints-cpu.txt) \
    && python /build/torchvision_operators.py
COPY . /src
RUN pip install --no-deps --no-build-isolation /src
RUN python -m venv /bom && /bom/bin/pip install cyclonedx-bom==7.5.0 \
    && /bom/bin/cyclonedx-py environment --output-format JSON \
        --output-file /opt/slipstream/sbom.cdx.json /opt/slipstream/bin/python

FROM ${BASE}
# g++: torch compiles parts of the model as it runs.
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home slipstream
COPY --from=build /opt/slipstream /opt/slipstream
ENV PATH=/opt/slipstream/bin:$PATH OMP_NUM_THREADS=1
USER 1000:1000
WORKDIR /home/slipstream
CMD ["slipstream", "--help"]
