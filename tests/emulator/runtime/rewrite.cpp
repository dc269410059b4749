#include "rewrite.h"

#include <cstring>
#include <set>

namespace emu {
namespace {

enum Kind { kIdentifier, kNumber, kString, kPunctuation, kEnd };
struct Token {
  Kind kind;
  std::string space;  // white space and directives before it
  std::string text;
  int line;
  int file;
};

bool identifier_start(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (unsigned char)c >= 128; }
bool digit(char c) { return c >= '0' && c <= '9'; }

struct TypeName {
  const char *name;
  uint32_t type, size;
};
const TypeName kScalars[] = {{"float", 3, 4}, {"half", 16, 2}, {"int", 29, 4}, {"uint", 33, 4}, {"short", 37, 2}, {"ushort", 41, 2},
                             {"char", 45, 1}, {"uchar", 49, 1}, {"bool", 53, 1}, {"long", 81, 8}, {"ulong", 85, 8}, {"bfloat", 121, 2},
                             {"int32_t", 29, 4}, {"uint32_t", 33, 4}, {"int16_t", 37, 2}, {"uint16_t", 41, 2}, {"int8_t", 45, 1},
                             {"uint8_t", 49, 1}, {"int64_t", 81, 8}, {"uint64_t", 85, 8}, {"size_t", 85, 8}};

void find_type(const std::string &text, uint32_t *type, uint32_t *size) {
  *type = 0, *size = 0;
  std::string base = text;
  int n = 1;
  if (base.size() > 1 && base.back() >= '2' && base.back() <= '4' && base.find("_t") == std::string::npos) n = base.back() - '0', base.pop_back();
  for (const TypeName &t : kScalars)
    if (base == t.name) *type = t.type + n - 1, *size = t.size * (n == 3 ? 4 : n);
}

const std::set<std::string> kThreadAttributes = {
    "thread_position_in_grid", "thread_position_in_threadgroup", "threadgroup_position_in_grid", "threads_per_grid", "threads_per_threadgroup",
    "threadgroups_per_grid", "dispatch_threads_per_threadgroup", "grid_origin", "grid_size", "thread_index_in_threadgroup",
    "thread_index_in_simdgroup", "simdgroup_index_in_threadgroup", "threads_per_simdgroup", "simdgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup", "dispatch_quadgroups_per_threadgroup", "thread_index_in_quadgroup",
    "quadgroup_index_in_threadgroup", "quadgroups_per_threadgroup", "thread_execution_width"};
// Attributes that only Metal knows and that change nothing here.
const std::set<std::string> kIgnoredAttributes = {"kernel", "host_name", "max_total_threads_per_threadgroup", "function_constant", "buffer", "threadgroup",
    "visible", "user_annotation", "required_threads_per_threadgroup", "always_inline", "max_work_group_size", "id", "raster_order_group"};

const std::map<std::string, std::string> kForbidden = {
    {"double", "'double' is not supported in Metal"}, {"virtual", "virtual functions are not supported in Metal"},
    {"try", "exceptions are not supported in Metal"}, {"throw", "exceptions are not supported in Metal"},
    {"dynamic_cast", "'dynamic_cast' is not supported in Metal"}, {"typeid", "'typeid' is not supported in Metal"},
    {"new", "'new' is not supported in Metal"}, {"thread_local", "'thread_local' is not supported in Metal"},
    {"goto", "'goto' is not supported in Metal"}};

class Rewriter {
 public:
  Rewriter(const std::string &in, const RewriteOptions &options) : in_(in), options_(options) {}

  Rewritten run() {
    tokenise();
    stage_keywords();
    literals();
    strings();
    conditionals();
    attributes_and_scopes();
    defined_queries();
    if (options_.wrap) out_.text = "namespace emu_user {\n";
    for (const Token &t : tokens_) out_.text += t.space, out_.text += t.text;
    if (options_.wrap) out_.text += "\n}\n";
    return std::move(out_);
  }

 private:
  const std::string &in_;
  const RewriteOptions &options_;
  std::vector<Token> tokens_;
  std::vector<std::string> files_;
  Rewritten out_;

  void error(size_t i, const std::string &text) { out_.errors.push_back({files_.empty() ? "" : files_[tokens_[i].file], tokens_[i].line, text}); }

  // ---- text to tokens ----

  // Metal's own pragmas mean something to this shim or nothing at all; the line stays.
  static std::string translate_directive(const std::string &line) {
    // clang -E leaves macros in an unroll count unexpanded; without its count the pragma still says "unroll".
    if (line.compare(0, 14, "#pragma unroll") == 0) {
      for (size_t k = 14; k < line.size(); k++)
        if (identifier_start(line[k])) return "#pragma unroll";
      return line;
    }
    size_t p = line.find("METAL");
    if (line.compare(0, 7, "#pragma") != 0 || p == std::string::npos) return line;
    size_t contract = line.find("contract");
    if (line.find(" fp ", p) != std::string::npos && contract != std::string::npos) return "#pragma clang fp " + line.substr(contract);
    return "";
  }

  void tokenise() {
    size_t i = 0, n = in_.size();
    int line = 1, file = 0;
    files_.push_back("");
    std::string space;
    bool line_start = true;
    while (true) {
      while (i < n && (in_[i] == ' ' || in_[i] == '\t' || in_[i] == '\n' || in_[i] == '\r' || (line_start && in_[i] == '#'))) {
        if (in_[i] == '#') {
          size_t e = in_.find('\n', i);
          if (e == std::string::npos) e = n;
          std::string directive = in_.substr(i, e - i);
          if (directive.size() > 2 && directive[1] == ' ' && digit(directive[2])) {
            line = atoi(directive.c_str() + 2) - 1;
            size_t q = directive.find('"'), r = directive.rfind('"');
            if (q != std::string::npos && r > q) files_.push_back(directive.substr(q + 1, r - q - 1)), file = (int)files_.size() - 1;
          }
          space += translate_directive(directive);
          i = e;
          continue;
        }
        if (in_[i] == '\n') line++, line_start = true;
        space += in_[i++];
      }
      line_start = false;
      if (i >= n) break;
      size_t b = i;
      Kind kind;
      char c = in_[i];
      if (identifier_start(c)) {
        kind = kIdentifier;
        while (i < n && (identifier_start(in_[i]) || digit(in_[i]) || in_[i] == '$')) i++;
        if (i < n && in_[i] == '"' && in_.substr(b, i - b) == "R") {  // raw string
          size_t open = in_.find('(', i);
          std::string close = ")" + in_.substr(i + 1, open - i - 1) + "\"";
          i = in_.find(close, open);
          i = i == std::string::npos ? n : i + close.size();
          kind = kString;
        }
      } else if (digit(c) || (c == '.' && i + 1 < n && digit(in_[i + 1]))) {
        kind = kNumber;
        while (i < n && (identifier_start(in_[i]) || digit(in_[i]) || in_[i] == '.' || in_[i] == '\'' ||
                         ((in_[i] == '+' || in_[i] == '-') && strchr("eEpP", in_[i - 1]) &&
                          (strchr("pP", in_[i - 1]) || !(in_[b] == '0' && (in_[b + 1] == 'x' || in_[b + 1] == 'X'))))))
          i++;
      } else if (c == '"' || c == '\'') {
        kind = kString;
        for (i++; i < n && in_[i] != c; i++)
          if (in_[i] == '\\') i++;
        i++;
      } else {
        kind = kPunctuation;
        static const char *const kLong[] = {"<<=", ">>=", "...", "->*", "::", "->", "++", "--", "<=", ">=", "==", "!=", "&&", "||",
                                            "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<"};
        size_t length = 1;  // '>>' stays two tokens: it mostly closes templates, and prints the same
        for (const char *l : kLong)
          if (in_.compare(i, strlen(l), l) == 0) {
            length = strlen(l);
            break;
          }
        i += length;
      }
      tokens_.push_back({kind, space, in_.substr(b, i - b), line, file});
      space.clear();
      for (size_t k = b; k < i; k++)
        if (in_[k] == '\n') line++;
    }
    tokens_.push_back({kEnd, space + "\n", "", line, file});
  }

  // ---- literals and words ----

  void literals() {
    for (size_t i = 0; i < tokens_.size(); i++) {
      Token &t = tokens_[i];
      if (t.kind == kIdentifier) {
        auto f = kForbidden.find(t.text);
        if (f != kForbidden.end()) error(i, f->second);
        if (t.text.compare(0, 6, "bfloat") == 0 && options_.language_version < 0x30001 && (t.text == "bfloat" || digit(t.text[6])))
          error(i, "'" + t.text + "' needs Metal 3.1");
        continue;
      }
      if (t.kind != kNumber) continue;
      bool hex = t.text.size() > 1 && (t.text[1] == 'x' || t.text[1] == 'X');
      bool floating = t.text.find('.') != std::string::npos || t.text.find_first_of(hex ? "pP" : "eE") != std::string::npos;
      char last = t.text.back();
      if (!hex && t.text.size() > 2 && (t.text.compare(t.text.size() - 2, 2, "bf") == 0 || t.text.compare(t.text.size() - 2, 2, "BF") == 0)) {
        std::string digits = t.text.substr(0, t.text.size() - 2);
        t.text = "(bfloat(" + digits + (digits.find_first_of(".eE") == std::string::npos ? ".0f))" : "f))");
      } else if ((last == 'h' || last == 'H') && !(hex && !floating)) {
        std::string digits = t.text.substr(0, t.text.size() - 1);
        t.text = "((half)" + digits + (floating ? "f)" : ".0f)");
      } else if (floating) {
        if (last == 'l' || last == 'L') error(i, "a literal of type 'long double' is not supported in Metal");
        else if (last != 'f' && last != 'F') t.text += "f";
      }
    }
  }

  // ---- string literals: they lie in constant memory ----

  void strings() {
    std::vector<std::string> calls;
    for (size_t i = 0; i < tokens_.size(); i++) {
      if (is(i, "(")) calls.push_back(i && tokens_[i - 1].kind == kIdentifier ? tokens_[i - 1].text : "");
      else if (is(i, ")") && !calls.empty()) calls.pop_back();
      else if (attribute_at(i)) i = close(i);
      else if (tokens_[i].kind == kString && tokens_[i].text[0] == '"' && !calls.empty()) {
        const std::string &f = calls.back();
        if (f == "static_assert" || f == "_Static_assert" || f.compare(0, 2, "__") == 0 || f == "asm" || f == "section" || f == "annotate") continue;
        if (tokens_[i + 1].kind == kString || (i && tokens_[i - 1].kind == kString)) continue;
        tokens_[i].text = "((constant char *)" + tokens_[i].text + ")";
      }
    }
  }

  // ---- conditionals ----

  // A branch of ?: that names memory of some address space would be an lvalue of that space, where Metal's builtin vectors
  // are loaded; so such branches are wrapped. Only plain memory expressions are: p[i], *p, p->x.
  void conditionals() {
    for (size_t i = 0; i < tokens_.size(); i++) {
      if (!is(i, "?")) continue;
      size_t colon = 0, end = 0;
      int depth = 0, nested = 0;
      size_t k = i + 1;
      for (; tokens_[k].kind != kEnd; k++) {
        const std::string &t = tokens_[k].text;
        if (t == "(" || t == "[" || t == "{") depth++;
        else if (t == ")" || t == "]" || t == "}") { if (--depth < 0) break; }
        else if (depth) continue;
        else if (t == ";") break;
        else if (t == "?") nested++;
        else if (t == ":" && nested-- == 0) { colon = k; break; }
      }
      if (!colon) continue;
      depth = 0;
      for (k = colon + 1; tokens_[k].kind != kEnd; k++) {
        const std::string &t = tokens_[k].text;
        if (t == "(" || t == "[" || t == "{") depth++;
        else if (t == ")" || t == "]" || t == "}") { if (--depth < 0) break; }
        else if (depth) continue;
        else if (t == ";" || t == "," || t == "?" || t == ":" || t == "=") break;
      }
      end = k;
      if (is(end, "?")) end = colon + 1;  // a chain: its own branches are wrapped at its turn
      wrap_memory(i + 1, colon);
      wrap_memory(colon + 1, end);
    }
  }
  void wrap_memory(size_t b, size_t e) {
    if (b >= e) return;
    if (e - b >= 3 && tokens_[e - 1].kind == kIdentifier && (is(e - 2, "::") || is(e - 2, "."))) {  // N::m, L<T>::m, x.m
      for (size_t k = b; k < e; k++)
        if (tokens_[k].kind != kIdentifier && !is(k, "::") && !is(k, "<") && !is(k, ">") && !is(k, ".")) return;
      tokens_[b].text = "metal::emu_value_of(" + tokens_[b].text;
      tokens_[e - 1].text += ")";
      return;
    }
    bool memory = is(b, "*");
    int depth = 0;
    for (size_t k = b; k < e; k++) {
      const std::string &t = tokens_[k].text;
      if (depth == 0 && (t == "?" || t == "<" || t == ">" || t == "&&" || t == "||" || t == "&")) return;
      if (depth == 0 && ((t == "[" && k > b) || t == "->")) memory = true;
      if (t == "(" || t == "[" || t == "{") depth++;
      if (t == ")" || t == "]" || t == "}") depth--;
      if (t == "{") return;
    }
    if (!memory || (is(e - 1, ")") && !is(b, "*"))) return;
    tokens_[b].text = "metal::emu_value_of(" + tokens_[b].text;
    tokens_[e - 1].text += ")";
  }

  // ---- helpers over tokens ----

  bool is(size_t i, const char *s) const { return tokens_[i].text == s; }
  size_t close(size_t i) const {  // matching ) ] }
    int depth = 0;
    for (; i + 1 < tokens_.size(); i++) {
      const std::string &t = tokens_[i].text;
      if (tokens_[i].kind != kPunctuation) continue;
      if (t == "(" || t == "[" || t == "{") depth++;
      if ((t == ")" || t == "]" || t == "}") && --depth == 0) return i;
    }
    return i;
  }
  size_t close_angle(size_t i) const {  // matching > of a template list
    int depth = 0;
    for (; i + 1 < tokens_.size(); i++) {
      const std::string &t = tokens_[i].text;
      if (t == "(" || t == "[" || t == "{") i = close(i);
      else if (t == "<") depth++;
      else if (t == ">" && --depth == 0) return i;
      else if (t == ";") return i;
    }
    return i;
  }
  std::string join(size_t b, size_t e) const {
    std::string s;
    for (size_t i = b; i < e; i++) {
      if (!s.empty()) s += ' ';
      s += tokens_[i].text;
    }
    return s;
  }
  void blank(size_t b, size_t e) {
    for (size_t i = b; i < e; i++) tokens_[i].text.clear();
  }
  bool attribute_at(size_t i) const { return is(i, "[") && is(i + 1, "[") && tokens_[i + 1].space.empty(); }

  int64_t evaluate(size_t b, size_t e, bool *ok) {
    size_t i = b;
    int64_t v = sum(i, e, ok);
    if (i != e) *ok = false;
    return v;
  }
  int64_t sum(size_t &i, size_t e, bool *ok) {
    int64_t v = product(i, e, ok);
    while (i < e && (is(i, "+") || is(i, "-"))) {
      bool plus = is(i++, "+");
      int64_t w = product(i, e, ok);
      v = plus ? v + w : v - w;
    }
    return v;
  }
  int64_t product(size_t &i, size_t e, bool *ok) {
    int64_t v = unary(i, e, ok);
    while (i < e && is(i, "*")) v *= unary(++i, e, ok);
    return v;
  }
  int64_t unary(size_t &i, size_t e, bool *ok) {
    if (i >= e) return *ok = false, 0;
    if (is(i, "(")) {
      int64_t v = sum(++i, e, ok);
      if (i < e && is(i, ")")) i++;
      else *ok = false;
      return v;
    }
    if (is(i, "+")) return unary(++i, e, ok);
    if (tokens_[i].kind != kNumber) return *ok = false, 0;
    return strtoll(tokens_[i++].text.c_str(), nullptr, 0);
  }

  struct Attribute {
    std::string name, text;
    uint32_t index = 0;
  };
  // Reads the attributes between b and e, and blanks those that are Metal's.
  std::vector<Attribute> take_attributes(size_t b, size_t e) {
    std::vector<Attribute> found;
    for (size_t i = b; i < e; i++) {
      if (!attribute_at(i)) continue;
      size_t end = close(i), k = i + 2;
      bool metal = false;
      while (k < end - 1) {
        size_t start = k;
        Attribute a;
        a.name = tokens_[k].text;
        while (is(k + 1, "::")) k += 2, a.name += "::" + tokens_[k].text;
        k++;
        if (is(k, "(")) {
          size_t c = close(k);
          bool ok = true;
          a.text = join(k + 1, c);
          a.index = (uint32_t)evaluate(k + 1, c, &ok);
          if (!ok && a.name == "buffer") error(start, "the index of [[buffer]] is not a plain integer expression");
          k = c + 1;
        }
        if (kThreadAttributes.count(a.name) || kIgnoredAttributes.count(a.name)) metal = true, found.push_back(a);
        if (is(k, ",")) k++;
        else break;
      }
      if (metal) blank(i, end + 1);
      i = end;
    }
    return found;
  }

  // `vertex` and `fragment` are keywords of Metal before a function's type or in an attribute, and no names.
  void stage_keywords() {
    for (size_t i = 1; i + 1 < tokens_.size(); i++) {
      if (!is(i, "vertex") && !is(i, "fragment")) continue;
      const bool attribute = is(i - 1, "[") && is(i + 1, "]");
      const bool qualifier = tokens_[i + 1].kind == kIdentifier && tokens_[i - 1].kind != kIdentifier && !is(i - 1, ".") && !is(i - 1, "->");
      if (!attribute && !qualifier) error(i, "'" + tokens_[i].text + "' is a keyword and cannot name anything");
    }
  }

  // ---- declarations ----

  struct Scope {
    char kind;          // n namespace, c class, f function or block, o other
    std::string name;
    bool in_kernel = false;
    std::set<std::string> methods;
  };

  void attributes_and_scopes() {
    std::vector<Scope> scopes{{'n', "", false, {}}};
    std::vector<Kernel> templates;  // kernel templates, instantiated by name
    size_t i = 0;
    while (tokens_[i].kind != kEnd) {
      Scope &scope = scopes.back();
      if (is(i, "}")) {
        if (scopes.size() > 1) scopes.pop_back();
        i++;
        continue;
      }
      if (is(i, ";")) {
        i++;
        continue;
      }
      if (scope.kind == 'f') i = function_statement(i, scopes);
      else if (scope.kind == 'o') i = is(i, "{") ? close(i) + 1 : i + 1;
      else i = declaration(i, scopes, templates);
    }
  }

  size_t function_statement(size_t i, std::vector<Scope> &scopes) {
    if (is(i, "{")) {
      Scope inner{'f', "", scopes.back().in_kernel, {}};
      scopes.push_back(inner);
      return i + 1;
    }
    storage(i, scopes.back().in_kernel);
    require_space_of_variable(i);
    // To the end of the statement; a brace within parentheses belongs to a lambda or an initialiser.
    for (int depth = 0; tokens_[i].kind != kEnd; i++) {
      if (is(i, "(")) depth++;
      else if (is(i, ")")) depth--;
      else if (attribute_at(i)) take_attributes(i, close(i) + 1), i = close_text(i);
      else if (is(i, ";") || is(i, "}")) {
        if (is(i, "}") && depth > 0) {
          scopes.pop_back();
          return i + 1;
        }
        if (depth <= 0 || is(i, ";")) return is(i, ";") ? i + 1 : i;
      } else if (is(i, "{")) {
        Scope inner{'f', "", scopes.back().in_kernel, {}};
        scopes.push_back(inner);
        return i + 1;
      }
    }
    return i;
  }
  // Blanked tokens no longer match brackets; an attribute is at most a few tokens, ended by the next text.
  size_t close_text(size_t i) const {
    while (tokens_[i].kind != kEnd && tokens_[i].text.empty()) i++;
    return i - 1;
  }

  // Storage of variables in a function: threadgroup ones live in a section that is placed per threadgroup.
  void storage(size_t i, bool in_kernel) {
    size_t first = i;
    bool is_static = false, is_threadgroup = false, is_constant = false, is_using = false;
    for (; tokens_[i].kind == kIdentifier; i++) {
      if (is(i, "static")) is_static = true;
      else if (is(i, "threadgroup")) is_threadgroup = true;
      else if (is(i, "constant")) is_constant = true;
      else if (is(i, "using") || is(i, "typedef")) is_using = true;
      else if (!is(i, "const") && !is(i, "constexpr") && !is(i, "volatile")) break;
    }
    if ((!is_threadgroup && !is_constant) || is_using || is_static) return;
    bool pointer = false;
    for (size_t k = i; tokens_[k].kind != kEnd && !is(k, ";") && !is(k, "=") && !is(k, "{"); k++) {
      if (is(k, "(") || is(k, "[")) k = close(k);
      else if (is(k, "<")) k = close_angle(k);
      else if (is(k, "*") || is(k, "&") || is(k, "&&")) pointer = true;
    }
    if (pointer) return;
    if (is_threadgroup) {
      if (!in_kernel) error(first, "variables in the threadgroup address space can only be declared in a kernel function");
      tokens_[first].text = "static __attribute__((section(\".emu_tg\"), aligned(16))) " + tokens_[first].text;
    } else {
      tokens_[first].text = "static " + tokens_[first].text;
    }
  }

  std::string qualified(const std::vector<Scope> &scopes, const std::string &name) const {
    std::string s;
    for (const Scope &scope : scopes)
      if (!scope.name.empty()) s += scope.name + "::";
    return s + name;
  }

  // One declaration at namespace or class scope, from i to its ';' or into its body.
  size_t declaration(size_t i, std::vector<Scope> &scopes, std::vector<Kernel> &templates) {
    size_t first = i;
    bool class_scope = scopes.back().kind == 'c';
    if (class_scope && (is(i, "public") || is(i, "private") || is(i, "protected")) && is(i + 1, ":")) return i + 2;
    if (is(i, "namespace")) {
      size_t b = i;
      while (!is(b, "{") && !is(b, ";") && tokens_[b].kind != kEnd) b++;
      if (is(b, "{")) {
        std::string name;
        for (size_t k = i + 1; k < b; k++)
          if (tokens_[k].kind == kIdentifier && !is(k, "inline")) name += (name.empty() ? "" : "::") + tokens_[k].text;
        scopes.push_back({'n', name, false, {}});
      }
      return b + 1;
    }
    if (is(i, "extern") && tokens_[i + 1].kind == kString && is(i + 2, "{")) {
      scopes.push_back({'n', "", false, {}});
      return i + 3;
    }
    bool instantiation = is(i, "template") && !is(i + 1, "<");
    bool is_template = is(i, "template") && is(i + 1, "<");
    size_t body = i;
    if (is_template) {
      body = i;
      while (is(body, "template") && is(body + 1, "<")) body = close_angle(body + 1) + 1;
    }
    // Find the end: ';' or '{' outside brackets. Note what is met on the way.
    bool is_kernel = false, is_class = false, is_enum = false, is_using = false, assigned = false;
    size_t parameters = 0, end = body, name = 0;
    for (; tokens_[end].kind != kEnd; end++) {
      const Token &t = tokens_[end];
      if (attribute_at(end)) {
        for (size_t k = end, e = close(end); k < e; k++)
          if (is(k, "kernel")) is_kernel = true;
        end = close(end);
      } else if (t.kind == kIdentifier) {
        if (t.text == "kernel") is_kernel = true;
        else if ((t.text == "struct" || t.text == "class" || t.text == "union") && !parameters) is_class = true;
        else if (t.text == "enum") is_enum = true;
        else if (t.text == "using" || t.text == "typedef" || t.text == "static_assert") is_using = true;
        else if ((t.text == "decltype" || t.text == "__attribute__" || t.text == "alignas" || t.text == "__asm" || t.text == "noexcept") && is(end + 1, "(")) end = close(end + 1);
        else if (t.text == "operator" && !parameters) {
          // operator() and operator T: the parameter list is the last parenthesis pair directly before the body.
          name = end;
          size_t k = end + 1;
          if (is(k, "(") && is(k + 1, ")")) k += 2;
          while (!is(k, "(") && tokens_[k].kind != kEnd) k++;
          parameters = k;
          end = close(k);
        }
      } else if (t.text == "<" && !assigned) {
        if (tokens_[end - 1].kind == kIdentifier) end = close_angle(end);
      } else if (t.text == "(") {
        if (!parameters && !assigned && end > body && tokens_[end - 1].kind == kIdentifier) parameters = end, name = end - 1;
        else if (!parameters && !assigned && is(end - 1, ">")) parameters = end, name = end - 1;
        end = close(end);
      } else if (t.text == "[") {
        end = close(end);
      } else if (t.text == "=") {
        assigned = true;
      } else if (t.text == ":" && parameters && !assigned) {  // constructor initialisers, each followed by () or {}
        size_t k = end + 1;
        while (tokens_[k].kind != kEnd) {
          while (!is(k, "(") && !is(k, "{") && tokens_[k].kind != kEnd) k = is(k, "<") ? close_angle(k) + 1 : k + 1;
          k = close(k) + 1;
          if (is(k, "...")) k++;
          if (!is(k, ",")) break;
          k++;
        }
        end = k - 1;
      } else if (t.text == "{") {
        if (assigned || (!parameters && !is_class && !is_enum)) end = close(end);  // an initialiser
        else break;
      } else if (t.text == ";") {
        break;
      } else if (t.text == "}") {
        return end;  // unbalanced; clang will say so
      }
    }
    bool has_body = is(end, "{");

    if (!is_using && parameters && !is_class && !assigned && !instantiation && (has_body || is(close(parameters) + 1, ";"))) require_spaces(parameters);
    if (!is_using && !parameters && !is_class && !is_enum && !is_template && !instantiation) require_space_of_variable(first);
    if (!is_using && parameters && !is_class) array_parameters(parameters);
    if (!is_using && parameters && !is_class) method_spaces(first, parameters, end, has_body, scopes.back(), class_scope);
    if (is(first, "") && tokens_[first].kind != kEnd) {  // a duplicate method, blanked with its body
      size_t k = first;
      while (tokens_[k].kind != kEnd && tokens_[k].text.empty()) k++;
      return k;
    }

    if (instantiation) {
      explicit_instantiation(first, end, scopes, templates);
      return end + 1;
    }
    if (is_kernel && parameters && !class_scope) {
      Kernel k;
      size_t named = name;
      k.expression = qualified(scopes, tokens_[named].text);
      k.host_name = tokens_[named].text;
      read_parameters(parameters, &k);
      for (const Attribute &a : take_attributes(first, parameters)) kernel_attribute(a, &k);
      for (const Attribute &a : take_attributes(close(parameters), end)) kernel_attribute(a, &k);
      if (has_body) {
        if (is_template) templates.push_back(k);
        else out_.kernels.push_back(k);
        scopes.push_back({'f', "", true, {}});
      } else if (is_template) {
        templates.push_back(k);
      }
      return end + 1;
    }
    std::vector<Attribute> attributes = take_attributes(first, end);
    for (const Attribute &a : attributes)
      if (a.name == "function_constant" && !has_body && !class_scope) {
        function_constant(first, end, a);
        return end + 1;
      }
    if (!has_body) {
      if (!class_scope && !parameters && !is_using) check_program_variable(first, end);
      return end + 1;
    }
    if (is_enum) scopes.push_back({'o', "", false, {}});
    else if (is_class && !(parameters && is(close(parameters) + 1, "{"))) scopes.push_back({'c', "", false, {}});
    else scopes.push_back({'f', "", false, {}});
    return end + 1;
  }

  // Metal wants an address space on every pointer and reference. `auto` takes it from its initialiser, and a pointer to a
  // function has none.
  void require_spaces(size_t open) {
    size_t end = close(open);
    for (size_t i = open + 1; i < end; i++) {
      size_t b = i, star = 0;
      bool space = false;
      for (; i < end && !is(i, ","); i++) {
        if (attribute_at(i) || is(i, "(")) {
          if (is(i, "(") && is(i + 1, "*")) space = true;
          i = close(i);
        } else if (is(i, "=")) {
          while (i < end && !is(i, ",")) i = is(i, "(") || is(i, "{") || is(i, "[") ? close(i) + 1 : is(i, "<") ? close_angle(i) + 1 : i + 1;
          break;
        } else if (is(i, "[")) {
          i = close(i);
        } else if (is(i, "<")) {
          i = close_angle(i);
        } else if (is(i, "device") || is(i, "threadgroup") || is(i, "constant") || is(i, "thread") || is(i, "auto")) {
          space = true;
        } else if ((is(i, "*") || is(i, "&")) && !star) {
          star = i;
        }
      }
      if (star && !space && star > b) missing_space(star);
    }
  }
  void missing_space(size_t star) {
    error(star, is(star, "*") ? "pointer type must have explicit address space qualifier" : "reference type must have explicit address space qualifier");
  }
  // `T *name` or `T &name` at the start of a statement or member, where T is a plain type name.
  void require_space_of_variable(size_t i) {
    while (is(i, "const") || is(i, "constexpr") || is(i, "static") || is(i, "volatile")) i++;
    static const std::set<std::string> kNoType = {"return", "delete", "case", "goto", "using", "typedef", "auto", "else", "do", "throw", "operator",
                                                  "template", "friend", "device", "threadgroup", "constant", "thread", "sizeof"};
    if (tokens_[i].kind != kIdentifier || kNoType.count(tokens_[i].text)) return;
    bool named_type = false;
    static const std::set<std::string> kTypes = {"float", "half", "int", "uint", "short", "ushort", "char", "uchar", "bool", "long", "ulong", "bfloat", "void", "size_t", "unsigned", "signed"};
    while (tokens_[i].kind == kIdentifier) {
      if (is(i, "device") || is(i, "threadgroup") || is(i, "constant") || is(i, "thread")) return;
      named_type = named_type || kTypes.count(tokens_[i].text) || (digit(tokens_[i].text.back()) && kTypes.count(tokens_[i].text.substr(0, tokens_[i].text.size() - 1)));
      if (is(i + 1, "::")) i += 2;
      else {
        i++;
        break;
      }
    }
    if (is(i, "<")) return;
    while (is(i, "const")) i++;
    size_t star = i;
    while (is(i, "*") || is(i, "&") || is(i, "const")) i++;
    if (i == star || tokens_[i].kind != kIdentifier) return;
    // With a type that is not a builtin's name, `a * b;` may be arithmetic: only an initialiser makes it a declaration.
    if (is(i + 1, "=") || (named_type && (is(i + 1, ";") || is(i + 1, ",")))) missing_space(star);
  }

  // An array parameter in an address space is a pointer; clang takes the array form in its OpenCL mode only.
  void array_parameters(size_t open) {
    size_t end = close(open);
    for (size_t i = open + 1; i < end;) {
      size_t b = i, bracket = 0;
      bool space = false, pointer = false;
      for (; i < end && !is(i, ","); i++) {
        if (attribute_at(i) || is(i, "(")) i = close(i);
        else if (is(i, "[")) bracket = bracket ? bracket : i, i = close(i);
        else if (is(i, "<")) i = close_angle(i);
        else if (is(i, "device") || is(i, "threadgroup") || is(i, "constant")) space = true;
        else if (is(i, "*") || is(i, "&") || is(i, "&&")) pointer = true;
      }
      if (space && bracket > b && !pointer && tokens_[bracket - 1].kind == kIdentifier) {
        size_t c = close(bracket);
        bool more = is(c + 1, "[") && !attribute_at(c + 1);
        tokens_[bracket - 1].text = (more ? "(*" : "*") + tokens_[bracket - 1].text + (more ? ")" : "");
        blank(bracket, c + 1);
      }
      i++;
    }
  }

  void check_program_variable(size_t b, size_t e) {
    bool is_threadgroup = false;
    for (size_t k = b; k < e && !is(k, "="); k++) {
      if (is(k, "*") || is(k, "&")) return;
      if (is(k, "threadgroup")) is_threadgroup = true;
    }
    if (is_threadgroup) error(b, "program scope variables must reside in the constant address space");
  }

  void kernel_attribute(const Attribute &a, Kernel *k) {
    if (a.name == "host_name" && a.text.size() > 2) k->host_name = unquote(a.text);
    if (a.name == "max_total_threads_per_threadgroup") k->max_total_threads = a.index;
  }
  static std::string unquote(const std::string &s) {  // adjacent literals are joined: "a" "b"
    std::string r;
    bool in = false;
    for (size_t i = 0; i < s.size(); i++) {
      if (s[i] == '"') in = !in;
      else if (in) r += s[i];
    }
    return r;
  }

  // An address space after a method's parameter list: with all objects reachable through the default space, the
  // versions for other spaces say the same thing again, so the first one stands for all.
  void method_spaces(size_t first, size_t parameters, size_t end, bool has_body, Scope &scope, bool class_scope) {
    size_t p = close(parameters);
    bool found = false;
    size_t k = p + 1;
    std::string qualifiers;
    for (; k < end; k++) {
      if (is(k, "device") || is(k, "threadgroup") || is(k, "constant") || is(k, "thread")) found = true, tokens_[k].text = " ";
      else if (is(k, "const") || is(k, "volatile")) qualifiers += " const";
      else break;
    }
    if (!class_scope) return;
    std::string signature = join(first, p + 1) + qualifiers;
    bool fresh = scope.methods.insert(signature).second;
    if (found && !fresh) {
      size_t last = has_body ? close(end) : end;
      blank(first, last + 1);
    }
  }

  void read_parameters(size_t open, Kernel *k, bool complain = true) {
    size_t end = close(open), i = open + 1;
    while (i < end) {
      size_t b = i;
      for (; i < end && !is(i, ","); i++) {
        if (is(i, "(") || is(i, "[")) i = close(i);
        else if (is(i, "<")) i = close_angle(i);
      }
      if (i > b && !(i == b + 1 && is(b, "void"))) {
        Parameter p;
        p.line = tokens_[b].line;
        size_t n = b;
        for (size_t j = b; j < i; j++) {
          if (attribute_at(j)) break;
          if (is(j, "<")) j = close_angle(j);
          else if (tokens_[j].kind == kIdentifier) n = j;
        }
        p.name = tokens_[n].text;
        for (const Attribute &a : take_attributes(b, i)) {
          if (a.name == "function_constant") p.condition = a.text;
          else if (a.name == "buffer" || a.name == "threadgroup") p.attribute = a.name, p.index = a.index;
          else if (kThreadAttributes.count(a.name)) p.attribute = a.name;
        }
        bool memory = false, shared = false;
        for (size_t j = b; j < i; j++) {
          if (is(j, "device") || is(j, "constant")) memory = true;
          if (is(j, "threadgroup")) shared = true;
        }
        if (p.attribute.empty()) {  // Metal numbers them by itself, in order
          if (memory || shared) {
            p.attribute = shared ? "threadgroup" : "buffer";
            uint32_t next = 0;
            for (const Parameter &q : k->parameters)
              if (q.attribute == p.attribute && q.index >= next) next = q.index + 1;
            p.index = next;
          } else if (complain) {
            error(b, "kernel parameter '" + p.name + "' has no attribute such as [[buffer(n)]] or [[thread_position_in_grid]]");
          }
        }
        k->parameters.push_back(p);
      }
      i++;
    }
  }

  void explicit_instantiation(size_t first, size_t end, const std::vector<Scope> &scopes, const std::vector<Kernel> &templates) {
    Kernel k;
    std::vector<Attribute> attributes;
    // The declarator's name: before the parameter list, or before the ';' where the type is a decltype.
    size_t last = end;
    while (last > first && (is(last - 1, "]") || tokens_[last - 1].text.empty())) last--;
    size_t e = end;
    if (is(e - 1, ")")) {
      int depth = 0;
      size_t j = e - 1;
      for (;; j--) {
        if (is(j, ")")) depth++;
        if (is(j, "(") && --depth == 0) break;
        if (j == first) break;
      }
      e = j;
      Kernel scratch;
      bool kernel_word = false;
      for (size_t q = first; q < j; q++) kernel_word |= is(q, "kernel");
      if (kernel_word) read_parameters(j, &scratch, false);
      else take_attributes(j, end);
      k.parameters = scratch.parameters;
    }
    size_t b = e;
    if (is(e - 1, ">")) {
      int depth = 0;
      for (b = e - 1; b > first; b--) {
        if (is(b, ">")) depth++;
        if (is(b, "<") && --depth == 0) break;
      }
    }
    b--;
    std::string base = tokens_[b].text;
    while (b >= 2 && is(b - 1, "::")) b -= 2;
    k.expression = join(b, e);
    attributes = take_attributes(first, end);
    for (const Attribute &a : attributes) kernel_attribute(a, &k);
    bool named = false;
    for (const Attribute &a : attributes) named |= a.name == "host_name";
    const Kernel *t = nullptr;
    std::string scoped = qualified(scopes, base);
    for (const Kernel &c : templates)
      if (c.host_name == base || c.expression == scoped) t = &c;
    if (!t) return;  // an instantiation of something else
    if (k.parameters.size() != t->parameters.size() || true) k.parameters = t->parameters;
    if (!k.max_total_threads) k.max_total_threads = t->max_total_threads;
    if (!named) k.host_name = k.expression;
    size_t qualifier = t->expression.rfind("::");
    if (qualifier != std::string::npos && k.expression.find("::") > k.expression.find("<")) k.expression = t->expression.substr(0, qualifier + 2) + k.expression;
    out_.kernels.push_back(k);
    if (options_.kernel >= 0) blank(first, end);
  }

  void function_constant(size_t first, size_t end, const Attribute &a) {
    Constant c;
    c.index = a.index;
    std::vector<size_t> words;
    for (size_t k = first; k < end; k++) {
      if (tokens_[k].text.empty()) continue;
      if (is(k, "=")) {
        error(k, "a function constant cannot have an initialiser");
        return;
      }
      if (!is(k, "constant") && !is(k, "const") && !is(k, "static") && !is(k, "extern") && !is(k, "constexpr")) words.push_back(k);
    }
    if (words.size() < 2) return;
    c.name = tokens_[words.back()].text;
    for (size_t k = 0; k + 1 < words.size(); k++)
      if (!is(words[k], "metal") && !is(words[k], "::")) c.type_text += (c.type_text.empty() ? "" : " ") + tokens_[words[k]].text;
    find_type(c.type_text, &c.type, &c.size);
    if (c.type_text == "unsigned int" || c.type_text == "unsigned") c.type = 33, c.size = 4;
    if (!c.type) error(first, "a function constant cannot be of type '" + c.type_text + "'");
    for (const Constant &o : out_.constants)
      if (o.index == c.index && o.name != c.name) error(first, "function constants '" + o.name + "' and '" + c.name + "' share index " + std::to_string(c.index));
    const ConstantValue *value = nullptr;
    if (options_.values) {
      auto v = options_.values->find(c.name);
      if (v != options_.values->end()) value = &v->second;
    }
    blank(first, end);
    if (value) tokens_[first].text = "static constexpr " + c.type_text + " " + c.name + " = " + literal(c, value->bytes);
    else tokens_[first].text = "extern const " + c.type_text + " " + c.name + " __asm__(\"emu_function_constant_" + std::to_string(c.index) + "\")";
    out_.constants.push_back(c);
  }

  static std::string literal(const Constant &c, const std::string &bytes) {
    TypeName t{};
    int n = 1;
    for (const TypeName &s : kScalars)
      if (c.type >= s.type && c.type < s.type + 4) {
        t = s, n = (int)(c.type - s.type) + 1;
        break;
      }
    std::string r = n > 1 ? c.type_text + "(" : "";
    for (int i = 0; i < n; i++) {
      uint64_t bits = 0;
      if ((i + 1) * t.size <= bytes.size()) memcpy(&bits, bytes.data() + i * t.size, t.size);
      if (i) r += ", ";
      std::string name = t.name;
      const char *word = t.size == 1 ? "uchar" : t.size == 2 ? "ushort" : t.size == 4 ? "uint" : "ulong";
      if (name == "bool") r += bits ? "true" : "false";
      else r += "__builtin_bit_cast(" + name + ", (" + word + ")" + std::to_string(bits) + "ul)";
    }
    return n > 1 ? r + ")" : r;
  }

  void defined_queries() {
    std::map<std::string, bool> guarded;
    for (size_t i = 0; i + 3 < tokens_.size(); i++) {
      if (!is(i, "is_function_constant_defined") || !is(i + 1, "(")) continue;
      size_t e = close(i + 1);
      std::string name = tokens_[e - 1].text;
      bool known = false;
      for (Constant &c : out_.constants) known |= c.name == name;
      if (!known) {
        error(i, "'" + name + "' is not a function constant");
        continue;
      }
      guarded[name] = true;
      blank(i, e + 1);
      if (!options_.values) tokens_[i].text = "metal::emu_unknown_bool";
      else tokens_[i].text = options_.values->count(name) ? "true" : "false";
      if (i >= 2 && is(i - 1, "::")) blank(i - 2, i);
    }
    for (Constant &c : out_.constants) c.required = !guarded.count(c.name);
  }
};

}  // namespace

uint32_t data_type_size(uint32_t type) {
  for (const TypeName &t : kScalars)
    if (type >= t.type && type < t.type + 4) return t.size * (type - t.type == 2 ? 4 : type - t.type + 1);
  return 0;
}

Rewritten rewrite(const std::string &preprocessed, const RewriteOptions &options) { return Rewriter(preprocessed, options).run(); }

}  // namespace emu
