-- One request, sent again and again by wrk. benchmarks/loadgen.py passes it in the environment and reads the last line.
wrk.method = "POST"
local file = assert(io.open(os.getenv("BENCH_BODY_FILE"), "rb"))
wrk.body = file:read("*a")
file:close()
for name, value in string.gmatch(os.getenv("BENCH_HEADERS"), "([^:\n]+): ([^\n]+)") do
  wrk.headers[name] = value
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    'BENCH {"requests": %d, "duration_us": %d, "p50_us": %d, "p90_us": %d, "p99_us": %d, "max_us": %d, '
      .. '"connect": %d, "read": %d, "write": %d, "status": %d, "timeout": %d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(90), latency:percentile(99),
    latency.max, errors.connect, errors.read, errors.write, errors.status, errors.timeout))
end
