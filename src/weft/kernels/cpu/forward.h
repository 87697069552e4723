// A network over a cache of keys and values, as its kernels read it.
#pragma once

#include "kernels.h"

// Pointers that may be null: q_norm and k_norm, weights [dim] of the norms of each head.
struct Block {
  const float *norm1, *norm2, *q_norm, *k_norm;
  Linear qkv, o, gate_up, down; // qkv: queries, keys and values side by side
  float *keys, *values;         // [slots, kv, room, dim]
  double scale;
  long window;
};

// A prefix that some rows go on from.
struct Prefix {
  const long *rows; // [count]
  long count, keys, room;
  const float *const *stored; // keys and values of each block
};

struct Step {
  float *states;                  // [rows, hidden], or [wants, hidden], to be filled
  const float *embedding, *norm;  // [vocabulary, hidden]; weight of the last norm
  const float *cos, *sin;         // [positions, half]; null without rotation
  const long *tokens, *positions; // [rows]
  const long *wanted;             // [wants], wants <= rows: those whose states are asked for; null for all
  const long *slots, *news, *lengths; // [count]: of each sequence its slot, its new tokens, and all it has there with them
  long rows, wants, count, blocks, vocabulary, hidden, heads, kv, dim, inner, half, room;
  long few, threads;
  double eps, offset; // of the norms
  const Prefix *prefixes;
  long shared; // how many prefixes
};

// How the tokens of some steps are drawn from the states of each.
struct Draws {
  const float *head, *bias;     // [vocabulary, hidden], and [vocabulary] or null
  const double *uniforms;       // [steps, rows]
  const unsigned char *is_stop; // [vocabulary]: tokens that end a completion
  const long *early;            // [rows]: steps in which a row may not draw them
  long *ids;                    // [steps, rows] and
  float *logprobs;              // [steps, rows], to be filled
  double temperature;
  long steps;
};

extern "C" long weft_forward(const Block *blocks, const Step *given);
