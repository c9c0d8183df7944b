// What options call shapes and ways: architectures, presets, and the names of each enum that an option chooses from.
// The one place for them: help, checks, logs and the model's configuration read them here.
//
//   const Preset& p = preset_named("m7c");
//   Arch a = value_of(arch_names, "llama");
#pragma once

#include <string>
#include <vector>

#include "model.h"

template <class E>
struct Named {
  const char* name;
  E value;
};

constexpr Named<Arch> arch_names[] = {
    {"simple", Arch::simple}, {"rope", Arch::rope}, {"llama", Arch::llama}, {"mlp", Arch::mlp}};
constexpr Named<Phi> phi_names[] = {{"mean", Phi::mean}, {"linear", Phi::linear}, {"mlp", Phi::mlp}};
constexpr Named<NsaGate> nsa_gate_names[] = {{"linear", NsaGate::linear}, {"mlp", NsaGate::mlp}};
constexpr Named<Recompute> recompute_names[] = {{"none", Recompute::none},
                                                {"mlp", Recompute::mlp},
                                                {"attn", Recompute::attn},
                                                {"both", Recompute::both},
                                                {"block", Recompute::block}};
constexpr Named<Wrap> wrap_names[] = {
    {"block", Wrap::block}, {"sublayer", Wrap::sublayer}, {"auto", Wrap::size}, {"single", Wrap::single}};
constexpr Named<BackwardPrefetch> backward_prefetch_names[] = {
    {"pre", BackwardPrefetch::pre}, {"post", BackwardPrefetch::post}, {"none", BackwardPrefetch::none}};

// The names, in their order.
template <class E, size_t n>
std::vector<const char*> names_of(const Named<E> (&table)[n]) {
  std::vector<const char*> names;
  for (const Named<E>& e : table) names.push_back(e.name);
  return names;
}
// name: one of the table's, which parse_options has checked.
template <class E, size_t n>
E value_of(const Named<E> (&table)[n], const std::string& name) {
  for (const Named<E>& e : table)
    if (name == e.name) return e.value;
  throw Error("internal error: no such name: " + name);
}

const char* name_of(Arch a);

// A model's sizes, and the batch that they are trained with.
struct Preset {
  const char* name;
  ModelConfig model;
  int64_t batch, grad_accum;  // sequences a micro-batch; micro-batches a step
};
const Preset& preset_named(const std::string& name);  // throws UsageError, which lists the names
std::vector<const char*> preset_names();
