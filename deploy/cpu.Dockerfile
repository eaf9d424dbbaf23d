# SiPipe with vLLM's CPU build. From the repository's root:
#   docker build -f deploy/cpu.Dockerfile -t sipipe:cpu .
#   docker run --rm -p 127.0.0.1:8000:8000 -v models:/models sipipe:cpu MODEL --pp 2
FROM python:3.11-slim-bookworm

# torch.compile calls the C++ compiler when a model is loaded; vLLM binds memory with libnuma.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 sipipe && install -d -o sipipe /opt/sipipe /models /caches
USER 1000
WORKDIR /opt/sipipe

# A build of torch for CPUs, from its makers' index; without it pip takes the one for CUDA.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1
COPY --chown=sipipe requirements/cpu.lock requirements/
COPY --chown=sipipe scripts/setup scripts/
# A layer of its own, which stays where only SiPipe changes.
RUN python3 scripts/setup --no-tools --engine-only
COPY --chown=sipipe pyproject.toml README.md LICENSE ./
COPY --chown=sipipe deploy/prefill_router.py deploy/
COPY --chown=sipipe src src
RUN python3 scripts/setup --no-tools
ENV PATH=/opt/sipipe/.venv/bin:$PATH \
    HF_HOME=/models \
    SIPIPE_CACHE_DIR=/opt/sipipe/cache

# The samplers' kernels, compiled for the processor that builds the image. On another type of
# processor a container compiles them when it starts, which takes a minute more.
RUN sipipe warm

EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python3", "-c", "import urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["sipipe", "serve"]
