#include "page.h"

#include <algorithm>
#include <cstdint>

#include "../../proxy/text/json_reader.h"

namespace pytriton::guard {
namespace {

// The page shows so many models, and only the number of the other ones.
constexpr size_t kMostModels = 200;
// A longer body is not shown, because nobody would copy it.
constexpr size_t kMostBody = 300;
constexpr uint64_t kMostValues = 64;

constexpr std::string_view kScript =
    R"(const u=new URL('.',location.href).href.replace(/\/$/,'');for(const e of document.querySelectorAll('.u'))e.textContent=u;)";
// The digest of that script, for the header Content-Security-Policy.
constexpr std::string_view kScriptDigest = "sha256-moHSnNlkeBagz+FZkMO4IbN6ygumwlWmPT5fKRvJTpw=";

constexpr std::string_view kHead = R"(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Models of this server</title><style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .25rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; }
th, td { text-align: left; padding: .1rem 1rem .1rem 0; vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: normal; opacity: .7; }
pre { padding: .6rem .8rem; border-radius: .4rem; background: rgb(128 128 128 / 15%); white-space: pre-wrap; overflow-wrap: anywhere; }
</style></head><body>
)";

std::string Escaped(std::string_view text) {
  std::string made;
  for (const char byte : text) {
    switch (byte) {
      case '&': made += "&amp;"; break;
      case '<': made += "&lt;"; break;
      case '>': made += "&gt;"; break;
      case '"': made += "&quot;"; break;
      case '\'': made += "&#39;"; break;
      default: made += byte;
    }
  }
  return made;
}

// Quotes a text for a shell.
std::string Quoted(std::string_view text) {
  std::string made = "'";
  for (const char byte : text) made += byte == '\'' ? std::string("'\\''") : std::string(1, byte);
  return made + "'";
}

// Writes a name as a part of a path.
std::string InPath(std::string_view name) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  std::string made;
  for (const char byte : name) {
    const auto code = static_cast<unsigned char>(byte);
    const bool is_plain = (byte >= '0' && byte <= '9') || (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') ||
                          byte == '.' || byte == '_' || byte == '-' || byte == '~';
    if (is_plain) {
      made += byte;
    } else {
      made += {'%', kDigits[code >> 4], kDigits[code & 15]};
    }
  }
  return made;
}

// The name of a data type in requests.
std::string Datatype(const GenerateInput& tensor) {
  if (tensor.type == "TYPE_STRING") return "BYTES";
  return tensor.type.substr(std::min<size_t>(tensor.type.size(), 5));
}

std::string Sizes(const GenerateInput& tensor) {
  std::string text;
  for (size_t i = tensor.is_batched ? 1 : 0; i < tensor.dims.size(); ++i) {
    text += (text.empty() ? "" : ", ") + std::to_string(tensor.dims[i]);
  }
  return "[" + text + "]";
}

bool IsInJson(const GenerateInput& tensor) { return tensor.type != "TYPE_FP16" && tensor.type != "TYPE_BF16"; }

// An example value of one sample for `generate`; "" if it is long, or JSON has none.
std::string Example(const GenerateInput& input) {
  uint64_t count = 1;
  for (size_t i = input.is_batched ? 1 : 0; i < input.dims.size(); ++i) {
    const uint64_t size = input.dims[i] < 0 ? (i + 1 == input.dims.size() ? 2 : 1) : static_cast<uint64_t>(input.dims[i]);
    if (size == 0 || __builtin_mul_overflow(count, size, &count) || count > kMostValues) return "";
  }
  // A text such as "hello" would be no image.
  if (!IsInJson(input) || input.is_file()) return "";
  if (input.json() != GenerateInput::Json::kNone) return input.json() == GenerateInput::Json::kObject ? "\"{}\"" : "\"[]\"";
  std::string list;
  for (uint64_t i = 0; i < count; ++i) {
    list += list.empty() ? "" : ", ";
    if (input.type == "TYPE_STRING") {
      list += i % 2 == 0 ? "\"hello\"" : "\"world\"";
    } else if (input.type == "TYPE_BOOL") {
      list += i % 2 == 0 ? "true" : "false";
    } else {
      list += std::to_string(i + 1) + (input.type.substr(0, 7) == "TYPE_FP" ? ".0" : "");
    }
  }
  return count == 1 ? list : "[" + list + "]";
}

// The body of an example request; "" if none is short enough.
std::string ExampleBody(const ModelInterface& model) {
  if (!std::all_of(model.outputs.begin(), model.outputs.end(), IsInJson)) return "";
  const bool has_required =
      std::any_of(model.inputs.begin(), model.inputs.end(), [](const auto& input) { return !input.is_optional; });
  std::string body;
  for (const GenerateInput& input : model.inputs) {
    if (has_required && input.is_optional) continue;
    const std::string value = Example(input);
    if (value.empty()) return "";
    body += (body.empty() ? "" : ", ") + JsonString(input.name) + ": " + value;
    // A model that requires no input still gets one.
    if (!has_required) break;
  }
  return body.empty() || body.size() > kMostBody ? "" : "{" + body + "}";
}

std::string PathOf(const PageModel& model) {
  return "/v2/models/" + InPath(model.name) + (model.interface.is_decoupled ? "/generate_stream" : "/generate");
}

std::string Rows(const char* what, const std::vector<GenerateInput>& tensors) {
  std::string rows;
  for (const GenerateInput& tensor : tensors) {
    rows += std::string("<tr><th>") + (rows.empty() ? what : "") + "</th><td>" + Escaped(tensor.name) + "</td><td>" +
            Escaped(tensor.hint) + "</td><td>" + Escaped(Datatype(tensor) + Sizes(tensor)) +
            (tensor.is_optional ? "</td><td>optional" : "") + "</td></tr>\n";
  }
  return rows;
}

std::string Section(const PageModel& model, std::string_view url) {
  std::string text = "<h2>" + Escaped(model.name) + (model.is_served ? "" : ": no worker is attached") + "</h2>\n<table>\n" + Rows("takes", model.interface.inputs) +
                     Rows("gives", model.interface.outputs) + "</table>\n";
  const std::string body = ExampleBody(model.interface);
  if (body.empty() && model.interface.inputs.size() == 1 && model.interface.inputs[0].is_file() && !model.interface.is_decoupled) {
    return text + "<pre>curl -s <span class=\"u\">" + Escaped(url) + "</span>" + Escaped("/v2/models/" + InPath(model.name)) +
           "/infer --data-binary @FILE -H &#39;Inference-Header-Content-Length: 0&#39; --output -</pre>\n";
  }
  if (body.empty()) return text + "<p>Its tensors are no plain JSON to be copied: see <code>pytriton infer</code>.</p>\n";
  return text + "<pre>curl -s" + (model.interface.is_decoupled ? "N " : " ") + "<span class=\"u\">" + Escaped(url) + "</span>" +
         Escaped(PathOf(model) + " -d " + Quoted(body)) + "</pre>\n";
}

std::string Tensors(const std::vector<GenerateInput>& tensors) {
  std::string list;
  for (const GenerateInput& tensor : tensors) {
    list += std::string(list.empty() ? "" : ", ") + "{\"name\": " + JsonString(tensor.name) + ", \"datatype\": " +
            JsonString(Datatype(tensor)) + ", \"shape\": " + Sizes(tensor) +
            (tensor.hint.empty() ? "" : ", \"hint\": " + JsonString(tensor.hint)) + (tensor.is_optional ? ", \"optional\": true}" : "}");
  }
  return "[" + list + "]";
}

}  // namespace

std::vector<PageModel> ReadIndex(std::string_view index) {
  std::vector<PageModel> models;
  JsonReader(index).Array([&](std::string_view entry) {
    PageModel model;
    JsonReader(entry).Object([&](const std::string& name, std::string_view value) {
      if (name == "name") JsonReader(value).String(&model.name);
      if (name == "version") JsonReader(value).String(&model.versions.emplace_back());
    });
    const auto same = std::find_if(models.begin(), models.end(), [&](const auto& one) { return one.name == model.name; });
    if (same == models.end()) {
      models.push_back(std::move(model));
    } else {
      same->versions.insert(same->versions.end(), model.versions.begin(), model.versions.end());
    }
  });
  std::sort(models.begin(), models.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return models;
}

std::string PageAsHtml(const std::vector<PageModel>& models, std::string_view url, bool hides_models) {
  std::string text(kHead);
  text += "<h1>Models of this server</h1>\n<p>A <a href=\"https://github.com/triton-inference-server/server\">Triton "
          "Inference Server</a> with models from Python. It speaks KServe's protocol 2 over HTTP and gRPC, and plain JSON.</p>\n";
  if (hides_models) {
    text += "<p>What models it has is told to those who know its token: see <code>pytriton models</code>.</p>\n";
  } else if (models.empty()) {
    text += "<p>It has no model that is ready.</p>\n";
  }
  const size_t shown = std::min(models.size(), kMostModels);
  for (size_t i = 0; i < shown; ++i) text += Section(models[i], url);
  if (shown < models.size()) text += "<p>and " + std::to_string(models.size() - shown) + " more</p>\n";
  const std::string place = "<span class=\"u\">" + Escaped(url) + "</span>";
  text += "<h2>More</h2>\n<table>\n<tr><th>OpenAPI</th><td><code>pytriton models " + place +
          " --openapi</code></td></tr>\n<tr><th>Console</th><td><code>pytriton console " + place +
          "</code></td></tr>\n<tr><th>Python</th><td><code>pytriton.client.ModelClient(\"" + place +
          "\", ...)</code></td></tr>\n</table>\n<script>";
  return text.append(kScript).append("</script></body></html>\n");
}

std::string PageAsJson(const std::vector<PageModel>& models, bool hides_models) {
  std::string list;
  const size_t shown = hides_models ? 0 : std::min(models.size(), kMostModels);
  for (size_t i = 0; i < shown; ++i) {
    const PageModel& model = models[i];
    const std::string body = ExampleBody(model.interface);
    std::string versions;
    for (const std::string& version : model.versions) versions += (versions.empty() ? "" : ", ") + JsonString(version);
    list += std::string(list.empty() ? "" : ",") + "\n  {\"name\": " + JsonString(model.name) + ", \"versions\": [" + versions +
            "], \"ready\": " + (model.is_served ? "true" : "false") + ", \"inputs\": " + Tensors(model.interface.inputs) + ", \"outputs\": " +
            Tensors(model.interface.outputs) +
            (body.empty() ? "" : ", \"path\": " + JsonString(PathOf(model)) + ", \"example\": " + body) + "}";
  }
  return "{\"models\": [" + list + (list.empty() ? "" : "\n ") + "], \"health\": \"/v2/health/ready\"" +
         (shown < models.size() && !hides_models ? ", \"left_out\": " + std::to_string(models.size() - shown) : "") + "}\n";
}

std::string PageHeaders(bool is_html) {
  const std::string common = "Vary: Accept\r\nCache-Control: no-cache\r\nX-Content-Type-Options: nosniff\r\n";
  if (!is_html) return common;
  return common + "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri "
                  "'none'; form-action 'none'; script-src '" + std::string(kScriptDigest) + "'\r\n";
}

}  // namespace pytriton::guard
