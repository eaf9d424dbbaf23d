"""What a user can get wrong: each line a mistake and what has to be said of it, at every door.

``[s]`` in front: only there (``s``: sipipe serve, ``v``: vllm serve, ``l``: ``LLM(...)``, as which
options become arguments). ``NAME=VALUE`` words: the environment. A first word in braces: another
model than the sound one. ``=>1``: a lack of this machine, status 1; else status 2. What is said is a
regular expression. A key in quotes stands for ``--additional-config '{"sipipe": {KEY: VALUE}}'``;
what each key may be is in tests/test_config.py, here are those that doors could tell apart.
"""

import dataclasses
import json
import shlex

SETTINGS = r"""
"samplers": 0 => "samplers" must be a whole number from 1 to 128
"samplers": 129 => "samplers" must be a whole number from 1 to 128
"inflight": 129 => "inflight" must be
"samplers": "many" => "samplers" must be .* or "auto", not 'many'
"sampler": 2 => unknown key "sampler"; did you mean "samplers"
"inflight": 0 => "inflight" must be
"cpu_sampling": "yes" => "cpu_sampling" must be one of
"cpu_sampling": "per_row" => "cpu_sampling" is "per_row"
"scheduler": "fifo" => "scheduler" must be one of "pipeline", "vllm"
"scheduler": null => "scheduler" must be
"microbatches": 4 => "microbatches" must be an object
"microbatches": {"max_move": 1} => did you mean "max_moves"
"microbatches": {"min_sequences": "auto"} => "microbatches.min_sequences" must be
"microbatches": {"tpot_target_ms": -5} => "microbatches.tpot_target_ms" must be
"layers": "evn" => did you mean "even"
"layers": [4] => "layers" must have one number for each of the 2 stages
"layers": [1, 2] => 4 layers together, not \[1, 2\]
"layers": [2, 1, 1] => "layers" must have one number for each of the 2 stages
"layers": "2,2" => "layers" must be
"vocabulary": "all" => "vocabulary" must be one of
"kv_loss": 1 => "kv_loss" must be a number from 0
"kv_loss": "10%" => "kv_loss" must be
"transport": "tcp" => "transport" must be "auto", "shm"
"transport": "cuda_ipc" => "transport" is "cuda_ipc", which joins stages on GPUs
"transport": "nixl" => "transport" is "nixl", which joins stages on several hosts
"transport": "nixl", "hosts": {"count": 2} => --master-addr|address
"devices": [0, 0] => "devices" are GPUs, and this engine runs on CPUs
"devices": [] => "devices" must be
"hosts": {"count": 0} => "hosts.count" must be
"hosts": {"nodes": 2} => unknown key "hosts.nodes"
"hosts": {"count": 2} => --master-addr|address
"hosts": {"count": 2, "address": "127.0.0.1"} => SIPIPE_SECRET
"hosts": {"port": 70000} => "hosts.port" must be a port
"hosts": {"stages": [1, 1]} => "hosts.stages"
"hosts": {"encrypt_links": "no"} => "hosts.encrypt_links" must be
"cores": {"stages": [[0]]} => "cores.stages" places 1 stages
"cores": {"stages": [[0], [4000]]} => "cores" names CPU 4000
"trace": "/dev/null/x" => trace: cannot write to '/dev/null/x' \(Not a directory\)
"trace_limit": 0 => "trace_limit" must be
"trace_limit": "1G" => "trace_limit" must be
"stall_timeout": "5m" => "stall_timeout" must be
"start_timeout": -1 => "start_timeout" must be
"Samplers": 2 => did you mean "samplers"
"temperature": 0 => unknown key "temperature"
"""

ENGINE = r"""
--additional-config '{"sipip": {"samplers": 2}}' => unknown key "sipip"; did you mean "sipipe"
--additional-config '{"SiPipe": {}}' => did you mean "sipipe"
--additional-config '{"samplers": 2}' => did you mean {"sipipe": {"samplers": ...}}
--additional-config '{"sipipe": 3}' => must be an object
--additional-config '[1]' => must be (a JSON|an) object|additional.config
--additional-config '{bad' => additional.config
[s] -pp 9 => ^sipipe: --pp 9: the model has 4 layers
[v] -pp 9 => ^sipipe: -pp 9: the model has 4 layers
[l] -pp 9 => ^pipeline_parallel_size 9: the model has 4 layers
-pp 0 => -pp\b|pipeline.parallel.size
-pp two => -pp\b|pipeline.parallel.size
-tp 3 => attention heads .*tensor parallel size|tensor.parallel
-tp 0 => -tp\b|tensor.parallel.size
-tp x => -tp\b|tensor.parallel.size
--max-num-seqs 0 => --max-num-seqs must be a whole number of 1
--max-num-seqs many => max.num.seqs
--max-num-batched-tokens 0 => --max-num-batched-tokens
--max-num-batched-tokens 8 --max-num-seqs 64 => max_num_batched_tokens
--max-model-len 9999999 => max_model_len
--max-model-len 0 => max.model.len
--max-model-len many => max.model.len
--max-model-len 2k5 => max.model.len
--gpu-memory-utilization 2 => --gpu-memory-utilization: .*less than or equal to 1
--gpu-memory-utilization 0 => --gpu-memory-utilization: .*greater than 0
--gpu-memory-utilization 1 =>1 --gpu-memory-utilization 1.*GiB of memory node
--gpu-memory-utilization half => gpu.memory.utilization
[sv] --kv-cache-memory-bytes 999G => --kv-cache-memory-bytes.* 999.0 GiB
[sv] --kv-cache-memory-bytes 64K => --max-model-len 512: one request of it takes
--kv-cache-memory-bytes lots => kv.cache.memory.bytes
VLLM_CPU_KVCACHE_SPACE=9999 => VLLM_CPU_KVCACHE_SPACE.* 9999.0 GiB
VLLM_CPU_KVCACHE_SPACE=0 => VLLM_CPU_KVCACHE_SPACE\) must be above 0
VLLM_CPU_KVCACHE_SPACE=lots => VLLM_CPU_KVCACHE_SPACE|lots
--enable-sleep-mode => sleep mode is not supported
--kv-offloading-size 1 => does not support --kv-offloading-size on CPUs
--block-size 0 => block.size
--block-size big => block.size
--dtype float17 => dtype
--dtype int8 => dtype
--kv-cache-dtype fp17 => cache.dtype
--quantization no-such => quantization
--tokenizer /no/such => --tokenizer|/no/such
--config-format no-such => config.format
--runner no-such => runner
--convert no-such => convert
--seed x => seed
--worker-cls my.Worker => --worker-cls my.Worker: SiPipe brings its own
--scheduler-cls vllm.v1.core.sched.async_scheduler.AsyncScheduler => --scheduler-cls .* schedules ahead
--scheduler-cls no.Such => --scheduler-cls no.Such: No module named
--scheduler-cls ../.. => --scheduler-cls ../..:
--data-parallel-backend nobody => data_parallel_backend
--speculative-config '{"method": "ngram_gpu", "num_speculative_tokens": 2}' => --speculative-config
--speculative-config '{"method": "mtp", "num_speculative_tokens": 1}' => speculative|MTP
--speculative-config '{"method": "eagle", "model": "/no/such/head", "num_speculative_tokens": 1}' => "/no/such/head": there is no such directory
--speculative-config '{"model": "/no/such/head", "num_speculative_tokens": 1}' => "/no/such/head": there is no such directory
--speculative-config '{"method": "draft_model", "model": "x", "num_speculative_tokens": 1}' => does not support "draft_model"
--speculative-config '{"method": "no-such", "num_speculative_tokens": 2}' => speculative|method
--speculative-config '{"method": "ngram", "num_speculative_tokens": 0}' => num_speculative_tokens
--speculative-config '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 5, "prompt_lookup_max": 2}' => prompt_lookup
--speculative-config '{"metod": "ngram"}' => metod
--speculative-config '{"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "block"}' => "rejection_sample_method": "block"
[sv] --speculative-config ngram => speculative.config
--speculative-config '[1]' => --speculative-config must be an object such as .*, not \[1\]
[sv] --data-parallel-size 2 --data-parallel-size-local 1 => --data-parallel-size on several hosts or by Ray: start a server
--data-parallel-size 0 => data.parallel.size
--prefill-context-parallel-size 2 => context.parallel
--decode-context-parallel-size 2 => dcp_size|context.parallel
--enable-eplb => load balancing|eplb
--enable-elastic-ep => elastic
--prefill-schedule-interval 4 => SiPipe does not support --prefill-schedule-interval
--async-scheduling --kv-transfer-config '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}' => --async-scheduling: not with --kv-transfer-config
--async-scheduling --speculative-config '{"method": "ngram", "num_speculative_tokens": 2}' => --async-scheduling: not with drafts
--ec-transfer-config '{"ec_connector": "x", "ec_role": "ec_both"}' => ec.(transfer|connector|role)
--kv-transfer-config '{"kv_connector": "KVFiles", "kv_connector_module_path": "sipipe.kv_files.connector", "kv_role": "kv_both"}' => "directory" has to be an absolute path
--kv-transfer-config '{"kv_connector": "KVFiles", "kv_connector_module_path": "sipipe.kv_files.connector", "kv_role": "kv_both", "kv_connector_extra_config": {"directory": "/a", "size": 5}}' => KVFiles has no size: directory, size_gib
--kv-transfer-config '{"kv_connector": "NoSuch", "kv_role": "kv_both"}' => NoSuch|kv.transfer
[sv] --kv-transfer-config '{"kv_connector": "ExampleConnector"}' => kv_role
[sv] --kv-transfer-config '{"kv_connector": "KVFile", "kv_connector_module_path": "sipipe.kv_files.connector", "kv_role": "kv_both"}' => KVFile not found in sipipe.kv_files.connector
[sv] --kv-transfer-config '{"kv_connector": "ExampleConnector", "kv_role": "both"}' => kv_role
[sv] --kv-events-config '{"publisher": "no-such"}' => publisher
[sv] --compilation-config '{"mode": 9}' => \bmode\b
[sv] --compilation-config '{"no_such": 1}' => no_such
[sv] --structured-outputs-config '{"backend": "no-such"}' => backend
--enable-lora --max-lora-rank 3 => max.lora.rank
--enable-lora --max-loras 0 => max.loras
[sv] --enable-lora --lora-modules a=/nonexistent => --lora-modules a "/nonexistent": there is no such
--hf-overrides '{"num_hidden_layers": 1}' => (-pp|pipeline_parallel_size) 2: the model has 1 layers
--hf-overrides nonsense => hf.overrides
--load-format no-such => --load-format "no-such"
--tokenizer-mode no-such => --tokenizer-mode "no-such"
--revision no-such-revision --trust-remote-code maybe => trust.remote.code|maybe
--logprobs-mode no-such => logprobs.mode
--max-logprobs -5 => max.logprobs
--watermark-config '{}' => watermark
--enable-trace-replay => --enable-trace-replay.*Triton
--return-sampling-mask --logprobs-mode processed_logprobs => --return-sampling-mask.*Triton
--cpu-offload-gb -1 => cpu.offload.gb
--worker-extension-cls no.Such => --worker-extension-cls no.Such: No module named
[sv] --logits-processors no.such:Thing => --logits-processors no.such:Thing: No module named
[sv] --logits-processors os => --logits-processors os: must be MODULE:CLASS
--io-processor-plugin no_such => --io-processor-plugin no_such is not installed
--allowed-local-media-path /no/such => --allowed-local-media-path "/no/such": there is no such directory
--generation-config /no/such => --generation-config "/no/such": there is no such directory
[sv] --model-loader-extra-config '{"bad": 1}' => --model-loader-extra-config: Unexpected extra config keys
--attention-backend NO_SUCH => NO_SUCH
--scheduling-policy lottery => policy
--prefix-caching-hash-algo md4 => hash.algo
--pipeline-paralel-size 2 => pipeline.paralel.size
--num-samplers 3 => num.samplers
VLLM_LOG_STATS_INTERVAL=often => VLLM_LOG_STATS_INTERVAL="often": could not convert
VLLM_LOGGING_LEVEL=loud => VLLM_LOGGING_LEVEL="loud" is no level: DEBUG, INFO
VLLM_LOGGING_CONFIG_PATH=/nonexistent => VLLM_LOGGING_CONFIG_PATH="/nonexistent" cannot be read
VLLM_LOG_BATCHSIZE_INTERVAL=often => VLLM_LOG_BATCHSIZE_INTERVAL="often": could not convert
VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=soon => VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS="soon": invalid literal
PROMETHEUS_MULTIPROC_DIR=/no/such => PROMETHEUS_MULTIPROC_DIR="/no/such" is no directory
PROMETHEUS_MULTIPROC_DIR=/etc/hosts => PROMETHEUS_MULTIPROC_DIR="/etc/hosts" is no directory
VLLM_PP_LAYER_PARTITION=9,9 => VLLM_PP_LAYER_PARTITION
VLLM_PP_LAYER_PARTITION=4 => VLLM_PP_LAYER_PARTITION
VLLM_PP_LAYER_PARTITION=0,4 => VLLM_PP_LAYER_PARTITION: each stage needs a layer
VLLM_PP_LAYER_PARTITION=a,b => VLLM_PP_LAYER_PARTITION
VLLM_PP_LAYER_PARTITION=2,2 --additional-config '{"sipipe": {"layers": "even"}}' => "layers" and VLLM_PP_LAYER_PARTITION
VLLM_USE_V2_MODEL_RUNNER=0 => VLLM_USE_V2_MODEL_RUNNER=0
VLLM_CPU_OMP_THREADS_BIND=0-x|1 => VLLM_CPU_OMP_THREADS_BIND
CPU_VISIBLE_MEMORY_NODES=77 => CPU_VISIBLE_MEMORY_NODES names no memory node
CPU_VISIBLE_MEMORY_NODES=a => CPU_VISIBLE_MEMORY_NODES
VLLM_CPU_OMP_THREADS_BIND=0 => VLLM_CPU_OMP_THREADS_BIND
SIPIPE_IGNORE_VLLM_VERSION=0 -pp 7 => (-pp|pipeline_parallel_size) 7
SIPIPE_SECRET=0123456789abcdef0123456789abcdef --additional-config '{"sipipe": {"hosts": {"count": 2, "address": "203.0.113.7"}}}' => port 29501 of 203.0.113.7 cannot be listened on
"""

EXECUTORS = r"""
[vl] --distributed-executor-backend sipipe.Excutor => "sipipe.Excutor": .*did you mean sipipe.Executor
[vl] --distributed-executor-backend sipipe:Executor => did you mean sipipe.Executor
[vl] --distributed-executor-backend sipipe.executor => did you mean sipipe.Executor
[vl] --distributed-executor-backend SiPipe => did you mean sipipe.Executor
[vl] --distributed-executor-backend sipipe.engine.Executor => did you mean sipipe.Executor
[vl] --distributed-executor-backend sipip.Executor => did you mean sipipe.Executor
[s] --distributed-executor-backend mp => --distributed-executor-backend is mp.*leave the option out
[s] --distributed-executor-backend sipipe.Excutor => sipipe runs sipipe.Executor
[s] --distributed-executor-backend uni => --distributed-executor-backend is uni
"""

SERVER = r"""
[s] --layers 3,3 => "layers" must have one number
[s] --vocabulary all => "vocabulary" must be
[s] --cores 0-3 => "cores" must be
[s] --tp 0 => --tp: must be a whole number
[s] --pp 2 -pp 3 => --pp.* -pp.*once
[s] --samplers 2 --additional-config '{"sipipe": {"samplers": 1}}' => "samplers" is 2 .* give it once
[s] --nnodes 2 => SIPIPE_SECRET|--master-addr
[s] --headless => --headless is for the other hosts
[s] --restart now => now
[s] --sampler 2 => did you mean --samplers
[s] --max-model-length 64 => did you mean --max-model-len
[s] --port 70000 => \bport\b
[s] --port http => --port
[s] --port {taken} => port .* cannot be listened on .*--port
[s] --host 203.0.113.7 => cannot be listened on
[s] --enable-auto-tool-choice => tool-call-parser
[s] --reasoning-parser no-such => reasoning.parser
[s] --chat-template /no/such.jinja => chat.template
[s] --tool-call-parser hermess --enable-auto-tool-choice => invalid tool call parser: hermess
[sv] --middleware no_such.Thing => --middleware no_such.Thing: No module named
[sv] --middleware thing => --middleware thing: must be MODULE.NAME
[sv] --middleware os.path.nothing => --middleware os.path.nothing: .*no attribute
[sv] --middleware os.path.join => --middleware os.path.join is neither a class nor
[s] --tool-parser-plugin /no/such.py --enable-auto-tool-choice --tool-call-parser mine => --tool-parser-plugin "/no/such.py" cannot be read
[sv] --ssl-certfile /no/such.pem => --ssl-certfile "/no/such.pem" cannot be read: No such file
[sv] --ssl-certfile {file} => --ssl-certfile .*file" do not make a certificate
[sv] --ssl-keyfile {file} => --ssl-keyfile: give its --ssl-certfile too
[sv] --ssl-ca-certs /no/such.pem => --ssl-ca-certs "/no/such.pem" cannot be read
[sv] --ssl-ciphers nonsense => --ssl-ciphers nonsense: names no cipher
[sv] --ssl-certfile ~nobody-is-named-so/x => --ssl-certfile .* cannot be read: No such file
[sv] --ssl-cert-reqs 9 => --ssl-cert-reqs 9: must be one of 0 \(CERT_NONE\)
[s] --chat-template '{% if %}' => --chat-template .*expression
[s] --chat-template {file_of_bad_template} => --chat-template .*expression
[sv] --tool-server nonsense => --tool-server "?nonsense"?
[s] --tool-parser-plugin {file_of_bad_python} --enable-auto-tool-choice --tool-call-parser mine => --tool-parser-plugin .*: a bad plugin
[s] --tool-parser-plugin {empty_python} --enable-auto-tool-choice --tool-call-parser mine => invalid tool call parser: mine
[s] --uds /no/such/directory/socket => --uds /no/such/directory/socket: there is no directory
[sv] --api-key '' => --api-key is empty
[sv] --allowed-origins 5 => --allowed-origins must be a JSON list
[sv] --shutdown-timeout 99999999999 => --shutdown-timeout must be at most 1000000 seconds
[sv] --fingerprint-mode custom => --fingerprint-mode custom: give its --fingerprint-value
[sv] --default-chat-template-kwargs '[1]' => --default-chat-template-kwargs must be a JSON object
[sv] --lora-modules a={empty_adapter} => --lora-modules a: give --enable-lora too
[sv] --enable-lora --lora-modules a={empty_adapter} => adapter_config.json" cannot be read: No such file
[sv] --enable-lora --lora-modules a={large_adapter} => --lora-modules a has rank 64, and --max-lora-rank is 16
[s] --config {file} => --config .*yaml
[s] --uds '' --port 0x => --port
[s] --uds {file} => --uds .*file: it is no socket
[s] SIPIPE_SECRET=0123456789abcdef0123456789abcdef --nnodes 2 --master-addr 10.0.0..1 => '10.0.0..1' is neither a host's name nor an address
[v] --nnodes 2 => nnodes
[v] --port http => --port
"""

MODELS = r"""
{nothing} => there is no such directory
{near} => there is no such directory; did you mean
{empty} => no config.json
{file} => \bfile\b
{no_config} => no config.json
{bad_config} => config.json|JSON
{no_architecture} => architecture
{unknown_type} => no_such_type|model type
{no_weights} => there is no weights
{half_weights} => model.safetensors" is not there or not whole
{no_tokenizer} => --tokenizer .* no tokenizer
models/none/at/all => "models/none/at/all": there is no such directory
tests/none => MODEL "tests/none" cannot be read: there is no such directory, nor was it found on the hub
tests/wrker => nor was it found on the hub; did you mean "tests/worker"
./no-such => "./no-such": there is no such directory
/no/such => "/no/such": there is no such directory
no-such-org/no-such-model => no-such-org/no-such-model
"""

DOORS = {"s": "sipipe serve", "v": "vllm serve", "l": "LLM"}


@dataclasses.dataclass(frozen=True)
class Wrong:
    """One mistake."""

    line: str
    """As in the table."""
    doors: str
    model: str
    """``MODEL``, or a name in braces."""
    words: tuple[str, ...]
    environment: dict[str, str]
    said: str
    status: int


def read(table: str) -> list[Wrong]:
    found = []
    for line in filter(None, table.splitlines()):
        given, said = line.split(" =>", 1)
        status, said = (1, said[1:]) if said.startswith("1") else (2, said)
        doors, given = given[1:].split("] ", 1) if given.startswith("[") else ("svl", given)
        if given.startswith('"'):
            given = f"--additional-config '{{\"sipipe\": {{{given}}}}}'"
        words, environment, model = [], {}, "{sound}"
        for word in shlex.split(given):
            name, _, value = word.partition("=")
            if not words and value and name.isupper():
                environment[name] = value
            else:
                words.append(word)
        if table is MODELS:
            model = words.pop(0)
        found.append(Wrong(line, doors, model, (*words,), environment, said.strip(), status))
    return found


USAGES = [wrong for table in (SETTINGS, ENGINE, EXECUTORS, SERVER, MODELS) for wrong in read(table)]


def arguments(words: tuple[str, ...]) -> dict:
    """``words`` as arguments of ``LLM``."""
    short = {"-pp": "pipeline_parallel_size", "-tp": "tensor_parallel_size"}
    found: dict = {}
    for word, value in zip(words, (*words, "--")[1:], strict=True):
        if not word.startswith("-") or word[1:].isdigit():
            continue
        name = short.get(word, word.lstrip("-").replace("-", "_"))
        if value.startswith("--"):
            found[name] = True
            continue
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
