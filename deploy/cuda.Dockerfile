# SiPipe on vLLM's own image for NVIDIA GPUs. docs/gpu.md says what of it has run on one.
#   docker build -f deploy/cuda.Dockerfile -t sipipe:cuda .
# With vLLM 0.33: --build-arg VLLM=0.33.0.
#   docker run --rm --gpus all -p 127.0.0.1:8000:8000 -v models:/models sipipe:cuda MODEL --pp 2
ARG VLLM=0.32.0
FROM vllm/vllm-openai:v${VLLM}

# As in cpu.Dockerfile, unless the base image has such a user.
RUN (getent passwd 1000 || useradd --create-home --uid 1000 sipipe) \
    && install -d -o 1000 /opt/sipipe /models /caches
WORKDIR /opt/sipipe
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python3 -m pip install --no-cache-dir .

USER 1000
ENV HF_HOME=/models \
    SIPIPE_CACHE_DIR=/opt/sipipe/cache
# As in cpu.Dockerfile: for the processor that builds the image.
RUN sipipe warm

EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python3", "-c", "import urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["sipipe", "serve"]
