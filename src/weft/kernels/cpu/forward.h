// Arguments of a network's forward pass over a cache of keys and values.
#pragma once

#include "kernels.h"

// q_norm and k_norm, the weights [dim] of the norms of each head, can be null.
struct Block {
  const float *norm1, *norm2, *q_norm, *k_norm;
  Linear qkv, o, gate_up, down; // qkv: queries, keys and values side by side
  float *keys, *values;         // [slots, kv, room, dim]
  double scale;
  long window;
};

// A prefix that some rows continue.
struct Prefix {
  const long *rows; // [count]
  long count, keys, room;
  const float *const *stored; // keys and values of each block
};

struct Step {
  float *states;                  // [rows, hidden], or [num_wanted, hidden], to be filled
  const float *embedding, *norm;  // [vocabulary, hidden]; weight of the last norm
  const float *cos, *sin;         // [positions, half]; null without rotation
  const long *tokens, *positions; // [rows]
  const long *wanted;             // [num_wanted], num_wanted <= rows: rows whose states are wanted; null for all
  const long *slots, *new_tokens, *lengths; // [count]: each sequence's slot, new tokens, and all tokens including these
  long rows, num_wanted, count, blocks, vocabulary, hidden, heads, kv, dim, inner, half, room;
  long few, threads;
  double eps, offset; // parameters of the norms
  const Prefix *prefixes;
  long shared; // number of prefixes
};

// Sampling parameters and results of decode steps.
struct Draws {
  const float *head, *bias;     // [vocabulary, hidden], and [vocabulary] or null
  const double *uniforms;       // [steps, rows]
  const unsigned char *is_stop; // [vocabulary]: tokens that end a completion
  const long *early;            // [rows]: steps in which a row may not draw them
  long *ids;                    // [steps, rows], to be filled
  float *logprobs;              // [steps, rows], to be filled
  double temperature;
  long steps;
};

extern "C" long weft_forward(const Block *blocks, const Step *given);
