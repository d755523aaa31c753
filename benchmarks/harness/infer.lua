-- Requests, sent again and again in turn by wrk. benchmarks/harness/generators.py passes them in the environment and
-- reads the last line. Of one alone wrk makes the bytes once; of several, this picks the next for each request.
wrk.method = "POST"
local function read(name)
  local file = assert(io.open(name, "rb"))
  local data = file:read("*a")
  file:close()
  return data
end
local function headers_of(text)
  local headers = {}
  for name, value in string.gmatch(text, "([^:\n]+): ([^\n]+)") do
    headers[name] = value
  end
  return headers
end
local bodies, headers = {}, {}
for name in string.gmatch(os.getenv("BENCH_BODY_FILES"), "[^\n]+") do
  bodies[#bodies + 1] = read(name)
  headers[#headers + 1] = headers_of(read(name .. ".headers"))
end
wrk.body = bodies[1]
for name, value in pairs(headers[1]) do
  wrk.headers[name] = value
end

if #bodies > 1 then
  local requests, at = {}, 0
  function init()
    for i = 1, #bodies do
      headers[i]["Host"] = wrk.headers["Host"]
      requests[i] = wrk.format(nil, nil, headers[i], bodies[i])
    end
  end
  function request()
    at = at % #requests + 1
    return requests[at]
  end
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    'BENCH {"requests": %d, "duration_us": %d, "p50_us": %d, "p90_us": %d, "p99_us": %d, "max_us": %d, '
      .. '"connect": %d, "read": %d, "write": %d, "status": %d, "timeout": %d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(90), latency:percentile(99),
    latency.max, errors.connect, errors.read, errors.write, errors.status, errors.timeout))
end
