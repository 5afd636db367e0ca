# docker build -t pykvgraph . ; for a GPU: an image with its compiler as BASE, and --build-arg CMAKE_ARGS=-DGGML_CUDA=on (docs/devices.md)
ARG BASE=python:3.12-slim
FROM ${BASE} AS build
ARG CMAKE_ARGS=""
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/pykvgraph && /opt/pykvgraph/bin/pip install --no-cache-dir pip==25.3
ENV PATH=/opt/pykvgraph/bin:$PATH
WORKDIR /source
COPY . .
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --group build && pip install --no-cache-dir --no-build-isolation '.[server]'

FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/pykvgraph /opt/pykvgraph
USER 65534
EXPOSE 8080
ENTRYPOINT ["/opt/pykvgraph/bin/pykvgraph", "serve", "--host", "0.0.0.0"]
