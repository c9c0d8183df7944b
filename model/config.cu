#include "model/config.h"

#include <algorithm>
#include <cmath>

NsaShape ModelConfig::nsa_shape(int64_t batch) const {
  NsaShape n = nsa;
  n.B = batch, n.T = seq, n.H = heads, n.HKV = kv_heads, n.D = head_dim(), n.DV = v_head_dim();
  n.ld = row(), n.scale = 1 / std::sqrt(double(n.D));
  return n;
}

// ------------------------------------------------------------------------------------------------------ parameters

bool is_among(const std::string& parameter, const std::string& some) {
  const size_t n = some.size();
  return parameter.compare(0, n, some) == 0 && (parameter.size() == n || parameter[n] == '.');
}

namespace {

// The module decides which unit a parameter goes to; units themselves do not know modules.
struct ModuleParam : Param {
  int module;
};

// All parameters in the order of the forward pass, which numbers them: initial weights do not depend on units.
std::vector<ModuleParam> all_parameters(const ModelConfig& c) {
  std::vector<ModuleParam> params;
  std::string prefix;
  int module = 0;
  auto add = [&](const std::string& name, std::vector<int64_t> shape, double mean, double std, bool joined = false) {
    ModuleParam p = {};
    p.name = prefix + "." + name;
    p.decay = shape.size() > 1;
    p.joined = joined;
    p.shape = std::move(shape);
    p.mean = float(mean), p.std = float(std);
    p.module = module;
    p.id = uint32_t(params.size());
    p.numel = 1;
    for (int64_t n : p.shape) p.numel *= n;
    // The products of q, k and v, of o, and of the MLP.
    p.fp8 = c.gather_fp8 && (joined || name == "attention.q" || name == "attention.o" || name == "mlp.gate" ||
                             name == "mlp.up" || name == "mlp.down");
    for (const std::string& some : c.frozen) p.frozen = p.frozen || is_among(p.name, some);
    params.push_back(std::move(p));
  };
  // With the parameter before it, as further rows of one matrix.
  auto join = [&](const std::string& name, std::vector<int64_t> shape, double std) {
    add(name, std::move(shape), /*mean=*/0, std, /*joined=*/true);
  };
  // Small init (Nguyen & Salazar 2019), and 1/sqrt(2L) on what writes into the residual stream (Radford et al. 2019).
  // Where positions are added to the embedding, or no norm comes before its first use, the embedding must be as large
  // as they are.
  const double small = std::sqrt(2.0 / (5.0 * double(c.dim))), into_stream = small / std::sqrt(2.0 * double(c.depth));
  const bool biases = c.arch == Arch::simple, layer_norm = biases || c.arch == Arch::mlp;
  const int64_t C = c.dim, F = c.hidden;
  auto norm = [&](const std::string& name) {
    add(name, {C}, 1, 0);
    if (layer_norm) add(name + ".bias", {C}, 0, 0);
  };
  prefix = "embedding";
  add("weight", {c.vocab, C}, 0, layer_norm && !c.tied ? 1 : small);
  for (int64_t i = 0; i < c.depth; i++) {
    prefix = strf("block.%lld", static_cast<long long>(i));
    if (c.attends()) {
      module = c.attention_module(i);
      const int64_t D = c.head_dim(), DV = c.v_head_dim();
      // Neighbours, so that one product makes them all.
      add("attention.q", {c.heads * D, C}, 0, small);
      const std::vector<const char*> branches =
          c.sparse ? std::vector<const char*>{"_compressed", "_selected", "_window"} : std::vector<const char*>{""};
      const std::pair<const char*, int64_t> kinds[] = {{"attention.k", D}, {"attention.v", DV}};
      const std::pair<const char*, int64_t> phis[] = {{"attention.phi_k", D}, {"attention.phi_v", DV}};
      for (const auto& [kind, width] : kinds)
        for (const char* branch : branches) join(std::string(kind) + branch, {c.kv_heads * width, C}, small);
      if (c.sparse) {
        const int64_t hidden = c.gate_hidden();
        if (hidden > 0) join("attention.gate.w1", {hidden, C}, small);
        else join("attention.gate", {c.gates(), C}, small);
        if (hidden > 0) add("attention.gate.w2", {c.gates(), hidden}, 0, small);
        // phi, for keys and for values.
        for (const auto& [of, width] : phis) {
          const int64_t in = c.nsa.block * width;
          if (c.nsa.phi == Phi::linear) add(std::string(of) + ".w1", {c.kv_heads * width, in}, 0, 1 / std::sqrt(in));
          if (c.nsa.phi != Phi::mlp) continue;
          add(std::string(of) + ".w1", {c.kv_heads * 2 * width, in}, 0, 1 / std::sqrt(in));
          add(std::string(of) + ".w2", {c.kv_heads * width, 2 * width}, 0, 1 / std::sqrt(2 * width));
        }
      }
      add("attention.o", {C, c.heads * DV}, 0, into_stream);
      norm("norm1");
      if (c.sparse) {
        // Gates start at one half.
        if (c.nsa_gate == NsaGate::linear) add("attention.gate.bias", {c.gates()}, 0, 0);
        else add("attention.gate.w1.bias", {c.gate_hidden()}, 0, 0), add("attention.gate.w2.bias", {c.gates()}, 0, 0);
        if (c.nsa.phi != Phi::mean)
          for (const auto& [of, width] : phis)
            add(std::string(of) + ".position", {c.kv_heads * c.nsa.block * width}, 0, 0.02);
      }
    }
    module = c.mlp_module(i);
    if (c.arch == Arch::llama) add("mlp.gate", {F, C}, 0, small);
    add("mlp.up", {F, C}, 0, small, c.arch == Arch::llama);
    add("mlp.down", {C, F}, 0, into_stream);
    if (c.attends()) norm("norm2");
    if (biases) add("mlp.up.bias", {F}, 0, 0), add("mlp.down.bias", {C}, 0, 0);
  }
  prefix = "head", module = c.head_module();
  if (!c.tied) add("weight", {c.vocab, C}, 0, small);
  norm("norm");
  return params;
}

// The unit of each module, counted in the order of the forward pass. sizes: parameters of each module.
std::vector<int> wrap(const ModelConfig& c, const std::vector<int64_t>& sizes) {
  std::vector<int> unit_of(static_cast<size_t>(c.modules()));
  int unit = -1;
  int64_t size = 0;  // of the unit that small modules are being put into; 0: none is open
  for (int m = 0; m < c.modules(); m++) {
    const int64_t own = sizes[size_t(m)];
    const int block = c.block_of(m);
    bool begins = true;
    if (c.wrap == Wrap::single) begins = m == 0;
    if (c.wrap == Wrap::block) begins = block < 0 || m == c.first_module(block);
    if (c.wrap == Wrap::size) {
      const bool small = own < c.wrap_min_params;
      begins = !small || size == 0 || (c.bucket_params > 0 && size + own > c.bucket_params);
      size = !small ? 0 : begins ? own : size + own;
      if (size >= c.wrap_min_params) size = 0;
    }
    unit += begins;
    unit_of[size_t(m)] = unit;
  }
  if (c.tied) unit_of.back() = unit_of.front();
  return unit_of;
}

}  // namespace

int last_of_backward(const ModelConfig& c) {
  int m = c.head_module();
  for (const ModuleParam& p : all_parameters(c))
    if (!p.frozen) m = std::min(m, p.module);
  return c.block_of(m) < 0 ? m : c.first_module(c.block_of(m));
}

bool of_phi(const Param& p) { return p.name.find(".phi_") != std::string::npos; }

namespace {

std::string module_name(const ModelConfig& c, int m) {
  if (m == 0) return "embedding";
  if (m == c.head_module()) return "head";
  const int block = c.block_of(m);
  if (!c.attends()) return strf("block.%d", block);
  return strf("block.%d.%s", block, m == c.attention_module(block) ? "attention" : "mlp");
}

// Of the modules from first to last.
std::string unit_name(const ModelConfig& c, int first, int last) {
  const int block = c.block_of(first);
  if (first == 0 && last >= c.head_module() - (c.tied ? 1 : 0)) return "model";
  if (block >= 0 && first == c.first_module(block) && last == c.mlp_module(block)) return strf("block.%d", block);
  return module_name(c, first) + (last > first ? ".." + module_name(c, last) : "");
}

}  // namespace

// From the options to units: modules are put together by wrap(), what is small is taken out into the replicated unit,
// and what is left empty is dropped. Every rank makes the same table, so nobody has to send it.
ParameterTable make_table(const ModelConfig& c) {
  const std::vector<ModuleParam> params = all_parameters(c);
  std::vector<int64_t> sizes(static_cast<size_t>(c.modules()));
  for (const ModuleParam& p : params) sizes[size_t(p.module)] += p.numel;
  const std::vector<int> wrapped = wrap(c, sizes);

  std::vector<Unit> units(size_t(*std::max_element(wrapped.begin(), wrapped.end()) + 1));
  std::vector<bool> sharded(size_t(c.modules()), false);
  Unit replicated;
  replicated.name = "replicated", replicated.replicated = true;
  for (size_t i = 0; i < params.size();) {  // what is joined stays together
    const size_t module = size_t(params[i].module);
    size_t end = i + 1;
    int64_t numel = params[i].numel;
    for (; end < params.size() && params[end].joined; end++) numel += params[end].numel;
    if (numel >= c.replicate_below) sharded[module] = true;
    Unit& u = numel < c.replicate_below ? replicated : units[size_t(wrapped[module])];
    u.params.insert(u.params.end(), params.begin() + int64_t(i), params.begin() + int64_t(end));
    i = end;
  }
  if (c.tied) sharded.back() = sharded.front();
  for (size_t u = 0; u < units.size(); u++) {
    int first = -1, last = -1;
    for (int m = 0; m < c.modules() - (c.tied ? 1 : 0); m++)
      if (wrapped[size_t(m)] == int(u)) first = first < 0 ? m : first, last = m;
    units[u].name = unit_name(c, first, last);
    // The embedding's weight is the head's too: its gradient is written at both ends of the backward pass, and reduced
    // twice unless one unit holds all that lies between.
    const bool shares = c.tied && units[u].name != "model" &&
                        std::any_of(units[u].params.begin(), units[u].params.end(),
                                    [](const Param& p) { return p.name == "embedding.weight"; });
    if (shares) units[u].name += " and head", units[u].reductions = last_of_backward(c) <= last ? 2 : 1;
  }
  // Units whose parameters are all replicated are none.
  ParameterTable table;
  std::vector<int> index(units.size(), -1);
  for (size_t u = 0; u < units.size(); u++) {
    if (units[u].params.empty()) continue;
    index[u] = int(table.units.size());
    table.units.push_back(std::move(units[u]));
  }
  for (size_t m = 0; m < wrapped.size(); m++) table.unit_of.push_back(sharded[m] ? index[size_t(wrapped[m])] : -1);
  if (table.units.size() == 1) table.units[0].reductions = 1;
  if (!replicated.params.empty()) table.units.push_back(std::move(replicated));
  return table;
}

std::vector<Unit> parameter_table(const ModelConfig& c) { return make_table(c).units; }

int64_t parameter_count(const ModelConfig& c) {
  int64_t n = 0;
  for (const Unit& u : parameter_table(c))
    for (const Param& p : u.params) n += p.numel;
  return n;
}

double flops_per_token(const ModelConfig& c) {
  const int last = last_of_backward(c);
  // Two FLOPs a weight and token in the forward pass, as many for dx where the backward pass comes by, and for dw.
  auto of_weight = [&](const ModuleParam& p, int module) {
    return 2.0 * (1 + (module >= last) + !p.frozen) * double(p.numel);
  };
  double flops = 0;
  for (const ModuleParam& p : all_parameters(c)) {
    if (p.module == 0 && c.tied) flops += of_weight(p, c.head_module());
    if (p.shape.size() < 2 || p.module == 0) continue;
    flops += of_weight(p, p.module) / (of_phi(p) ? double(c.nsa.stride) : 1.0);  // once for each compressed key
  }
  if (!c.attends()) return flops;
  double keys = double(c.seq) / 2;
  if (c.sparse) {
    const NsaShape n = c.nsa_shape(1);
    double sum = 0;
    for (int64_t t = 0; t < c.seq; t++) {
      const int64_t current = t / n.select_block, compressed = n.compressed_seen(t);
      sum += double(compressed + std::min(t + 1, n.window));
      sum += double(current < n.selected ? t + 1 : (n.selected - 1) * n.select_block + t % n.select_block + 1);
    }
    keys = sum / double(c.seq);
  }
  const double widths = double(c.heads * (c.head_dim() + c.v_head_dim()));
  for (int64_t i = 0; i < c.depth; i++) flops += (c.attention_module(i) >= last ? 6 : 2) * widths * keys;
  return flops;
}

// ----------------------------------------------------------------------------------------------------------- turns

namespace {

// Fills in what follows from the order: where runs of turns with one unit begin and end.
void link_turns(std::vector<Turn>* turns) {
  Turn *use = nullptr, *gradient = nullptr;
  for (Turn& t : *turns) {
    if (t.uses >= 0) {
      t.begins_use = !use || use->uses != t.uses;
      if (use) use->ends_use = t.begins_use;
      use = &t;
    }
    if (t.writes >= 0) {
      t.begins_gradient = !gradient || gradient->writes != t.writes;
      if (gradient) gradient->ends_gradient = t.begins_gradient;
      gradient = &t;
    }
  }
  if (use) use->ends_use = true;
  if (gradient) gradient->ends_gradient = true;
  size_t next = turns->size();
  for (size_t i = turns->size(); i-- > 0;) {
    (*turns)[i].next_use = next;
    if ((*turns)[i].begins_use) next = i;
  }
}

}  // namespace

std::vector<Turn> training_turns(const ModelConfig& c, const std::vector<int>& unit_of) {
  std::vector<Turn> turns;
  auto add = [&](Turn::Kind kind, int module) {
    Turn t;
    t.kind = kind, t.module = module;
    // The embedding's backward adds up rows of its output's gradient, and reads no weights.
    t.uses = kind == Turn::gradient && module == 0 ? -1 : unit_of[size_t(module)];
    t.writes = kind == Turn::gradient ? unit_of[size_t(module)] : -1;
    turns.push_back(t);
  };
  const int head = c.head_module(), last = last_of_backward(c);
  for (int m = 0; m < head; m++) add(Turn::forward, m);
  add(Turn::gradient, head);
  for (int64_t block = c.depth - 1; block >= 0 && c.mlp_module(block) >= last; block--) {
    if (c.attends() && !c.keeps_middle())
      add(Turn::recompute, c.attention_module(block)), add(Turn::recompute, c.mlp_module(block));
    add(Turn::gradient, c.mlp_module(block));
    if (c.attends()) add(Turn::gradient, c.attention_module(block));
  }
  if (last == 0) add(Turn::gradient, 0);
  link_turns(&turns);
  // The unit that the forward pass ends with stays resident: the backward pass wants it first, behind the head at most.
  for (int m = 0; m < head; m++) turns[size_t(m)].reshards = turns[size_t(m)].next_use < size_t(head);
  return turns;
}

std::vector<Turn> evaluation_turns(const ModelConfig& c, const std::vector<int>& unit_of) {
  std::vector<Turn> turns;
  for (int m = 0; m < c.modules(); m++) {
    Turn t;
    t.kind = Turn::forward, t.module = m, t.uses = unit_of[size_t(m)], t.reshards = true;
    turns.push_back(t);
  }
  link_turns(&turns);
  return turns;
}

// ----------------------------------------------------------------------------------------------------------- batch

Pieces pieces_of(const ModelConfig& c, int64_t batch, int64_t element_bytes) {
  const int64_t M = batch * c.seq;
  // In whole tiles where pieces are large, all alike but the last.
  auto piece = [&](int64_t pieces) {
    const int64_t rows = (M + pieces - 1) / pieces, tile = rows >= 128 ? 128 : c.fp8 || c.save_fp8 ? 16 : 1;
    return std::min(M, (rows + tile - 1) / tile * tile);
  };
  const int64_t most = std::max<int64_t>(c.logits_bytes / (c.vocab * element_bytes), 1);
  const int64_t row = c.hidden_row() * element_bytes;
  Pieces p;
  p.logits = piece((M + most - 1) / most);
  p.hidden = piece((M * row + c.hidden_bytes - 1) / c.hidden_bytes);
  const int64_t half = (p.hidden + 1) / 2;
  p.hidden_forward = p.hidden * row * 2 <= c.hidden_bytes ? p.hidden : (half + 127) / 128 * 128;
  return p;
}

MicroBatch micro_batch_at(int32_t* p, int64_t M) { return {p, p + M, p + 2 * M}; }

int64_t batch_ints(const ModelConfig& c, int64_t batch) {
  int64_t M = batch * c.seq;
  return 2 * M + ops::token_index_ints(M, c.vocab);
}

void index_batch(const ModelConfig& c, int64_t batch, int32_t* host) {
  const int64_t M = batch * c.seq;
  const MicroBatch b = micro_batch_at(host, M);
  ops::build_token_index(b.index, b.tokens, M, c.vocab);
}
