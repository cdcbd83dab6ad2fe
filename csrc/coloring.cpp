// Distance-2 coloring of one side of a bipartite pattern, star coloring of a symmetric pattern, the transpose of a
// pattern, and sorting by color.
#include "coloring.h"

#include "ops/common.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

namespace fastgrad {
namespace {

// A pattern whose indices were checked.
struct Pattern {
  Pattern(const char* name, const at::Tensor& starts, const at::Tensor& members, int64_t targets) : targets(targets) {
    check_indices(name, "starts", starts);
    check_indices(name, "members", members);
    TORCH_CHECK(
        starts.is_cpu() && members.is_cpu(), name, ": starts and members must be on the CPU, got ", starts.device(),
        " and ", members.device());
    TORCH_CHECK(
        starts.numel() > 0, name, ": starts must have one element more than there are vertices, got no element");
    vertices = starts.numel() - 1;
    nonzeros = members.numel();
    start = starts.const_data_ptr<int64_t>();
    member = members.const_data_ptr<int64_t>();
    TORCH_CHECK(
        start[0] == 0 && start[vertices] == nonzeros && std::is_sorted(start, start + vertices + 1), name,
        ": starts must rise from 0 to the number of members, ", nonzeros, ", got ", start[0], " to ", start[vertices]);
    check_range(name, "members", members, targets);
  }

  int64_t size(int64_t vertex) const { return start[vertex + 1] - start[vertex]; }

  int64_t vertices, nonzeros, targets;
  const int64_t* start;
  const int64_t* member;
};

// How often each key in [0, size) occurs.
std::vector<int64_t> counts_of(const int64_t* keys, int64_t length, int64_t size) {
  std::vector<int64_t> count(size);
  for (int64_t k = 0; k < length; ++k) {
    ++count[keys[k]];
  }
  return count;
}

// Where each key begins in sorted order and, at the end, the number of keys: int64, shape (size + 1,).
at::Tensor starts_of(const int64_t* keys, int64_t length, int64_t size) {
  const std::vector<int64_t> counts = counts_of(keys, length, size);
  at::Tensor starts = at::zeros({size + 1}, at::kLong);
  std::partial_sum(counts.begin(), counts.end(), starts.mutable_data_ptr<int64_t>() + 1);
  return starts;
}

// The vertices in the order of decreasing number of targets (stable).
std::vector<int64_t> largest_first(const Pattern& pattern) {
  int64_t largest = 0;
  for (int64_t vertex = 0; vertex < pattern.vertices; ++vertex) {
    largest = std::max(largest, pattern.size(vertex));
  }
  std::vector<int64_t> place(largest + 1);  // the position of the next vertex of each size
  for (int64_t vertex = 0; vertex < pattern.vertices; ++vertex) {
    ++place[pattern.size(vertex)];
  }
  int64_t before = 0;
  for (int64_t size = largest; size >= 0; --size) {
    before += std::exchange(place[size], before);
  }
  std::vector<int64_t> order(pattern.vertices);
  for (int64_t vertex = 0; vertex < pattern.vertices; ++vertex) {
    order[place[pattern.size(vertex)]++] = vertex;
  }
  return order;
}

// First fit in the given order; returns the number of colors. 64 colors are assigned at a time, so that one word
// per target says which of them it has. If no color fits a vertex, its first target usually shows this.
int64_t first_fit(const Pattern& pattern, std::vector<int64_t> waiting, int64_t* colors) {
  constexpr uint64_t full = std::numeric_limits<uint64_t>::max();
  std::vector<uint64_t> taken(pattern.targets);
  std::vector<int64_t> colored;
  int64_t count = 0;
  for (int64_t first = 0; !waiting.empty(); first += 64) {
    colored.clear();
    size_t left = 0;
    for (const int64_t vertex : waiting) {
      const int64_t* const begin = pattern.member + pattern.start[vertex];
      const int64_t* const end = pattern.member + pattern.start[vertex + 1];
      uint64_t seen = 0;
      for (const int64_t* target = begin; target != end && seen != full; ++target) {
        seen |= taken[*target];
      }
      if (seen == full) {
        waiting[left++] = vertex;
        continue;
      }
      const int free = __builtin_ctzll(~seen);
      for (const int64_t* target = begin; target != end; ++target) {
        taken[*target] |= uint64_t{1} << free;
      }
      colors[vertex] = first + free;
      count = std::max(count, first + free + 1);
      colored.push_back(vertex);
    }
    waiting.resize(left);
    for (const int64_t vertex : colored) {
      for (int64_t k = pattern.start[vertex]; k < pattern.start[vertex + 1]; ++k) {
        taken[pattern.member[k]] = 0;
      }
    }
  }
  return count;
}

// The neighbors of a vertex that have one color.
struct Leaves {
  int64_t color;
  int64_t count;
  int64_t last;  // one of them
};

// A star coloring that grows vertex by vertex. For each pair of colors, the edges between them form stars
// as long as no edge has, at both of its ends, a further neighbor of the color at its other end.
class Stars {
 public:
  explicit Stars(const Pattern& pattern) : pattern_(pattern), leaves_(pattern.vertices) {}

  // First fit in the given order; returns the number of colors, or none if it is more than `most`.
  std::optional<int64_t> first_fit(const std::vector<int64_t>& order, int64_t most, int64_t* colors) {
    std::fill_n(colors, pattern_.vertices, -1);
    int64_t count = 0;
    std::vector<int64_t> refused;  // by color: the last vertex that it did not fit
    for (const int64_t vertex : order) {
      refuse(vertex, colors, refused);
      int64_t color = 0;
      while (color < count && refused[color] == vertex) {
        ++color;
      }
      if (color == count) {
        if (++count > most) {
          return std::nullopt;
        }
        refused.push_back(-1);
      }
      colors[vertex] = color;
      for_neighbors(vertex, [&](int64_t neighbor) { add(neighbor, color, vertex); });
    }
    return count;
  }

 private:
  template <typename Visit>
  void for_neighbors(int64_t vertex, const Visit& visit) const {
    for (int64_t k = pattern_.start[vertex]; k < pattern_.start[vertex + 1]; ++k) {
      if (pattern_.member[k] != vertex) {
        visit(pattern_.member[k]);
      }
    }
  }

  void refuse(int64_t vertex, const int64_t* colors, std::vector<int64_t>& refused) const {
    for_neighbors(vertex, [&](int64_t neighbor) {
      const int64_t own = colors[neighbor];
      if (own < 0) {
        return;
      }
      refused[own] = vertex;
      const bool has_others = count(vertex, own) > 1;
      for (const Leaves& leaves : leaves_[neighbor]) {
        // If the hub has several leaves of this color, none of them has another neighbor of the hub's color. A single
        // leaf may have one.
        if (has_others || (leaves.count == 1 && count(leaves.last, own) > 1)) {
          refused[leaves.color] = vertex;
        }
      }
    });
  }

  int64_t count(int64_t vertex, int64_t color) const {
    for (const Leaves& leaves : leaves_[vertex]) {
      if (leaves.color == color) {
        return leaves.count;
      }
    }
    return 0;
  }

  void add(int64_t vertex, int64_t color, int64_t leaf) {
    for (Leaves& leaves : leaves_[vertex]) {
      if (leaves.color == color) {
        ++leaves.count;
        leaves.last = leaf;
        return;
      }
    }
    leaves_[vertex].push_back({color, 1, leaf});
  }

  const Pattern& pattern_;
  std::vector<std::vector<Leaves>> leaves_;
};

}  // namespace

at::Tensor color(const at::Tensor& starts, const at::Tensor& members, int64_t targets) {
  const Pattern pattern("color", starts, members, targets);
  int64_t bound = 0;
  for (const int64_t count : counts_of(pattern.member, pattern.nonzeros, pattern.targets)) {
    bound = std::max(bound, count);
  }
  if (bound <= 1) {
    return at::zeros({pattern.vertices}, at::kLong);  // no two vertices share a target
  }
  if (bound == pattern.vertices) {
    return at::arange(pattern.vertices, at::kLong);  // all vertices share one target
  }
  const at::Tensor natural = at::empty({pattern.vertices}, at::kLong);
  std::vector<int64_t> order(pattern.vertices);
  std::iota(order.begin(), order.end(), 0);
  const int64_t count = first_fit(pattern, std::move(order), natural.mutable_data_ptr<int64_t>());
  if (count <= std::max<int64_t>(bound, 1)) {
    return natural;
  }
  order = largest_first(pattern);
  if (std::is_sorted(order.begin(), order.end())) {
    return natural;
  }
  const at::Tensor other = at::empty({pattern.vertices}, at::kLong);
  return first_fit(pattern, std::move(order), other.mutable_data_ptr<int64_t>()) < count ? other : natural;
}

at::Tensor star_color(const at::Tensor& starts, const at::Tensor& members, int64_t most) {
  const Pattern pattern("star_color", starts, members, std::max<int64_t>(starts.numel() - 1, 0));
  const at::Tensor natural = at::empty({pattern.vertices}, at::kLong);
  std::vector<int64_t> order(pattern.vertices);
  std::iota(order.begin(), order.end(), 0);
  const auto count = Stars(pattern).first_fit(order, most, natural.mutable_data_ptr<int64_t>());
  order = largest_first(pattern);
  if ((!count || *count > 2) && !std::is_sorted(order.begin(), order.end())) {
    const at::Tensor other = at::empty({pattern.vertices}, at::kLong);
    if (Stars(pattern).first_fit(order, count ? *count - 1 : most, other.mutable_data_ptr<int64_t>())) {
      return other;
    }
  }
  return count ? natural : at::empty({0}, at::kLong);
}

std::tuple<at::Tensor, at::Tensor> transpose(const at::Tensor& starts, const at::Tensor& members, int64_t targets) {
  const Pattern pattern("transpose", starts, members, targets);
  at::Tensor starts_of_targets = starts_of(pattern.member, pattern.nonzeros, targets);
  at::Tensor vertices = at::empty({pattern.nonzeros}, at::kLong);
  const auto* start = starts_of_targets.const_data_ptr<int64_t>();
  std::vector<int64_t> place(start, start + targets);  // the position of the next vertex of each target
  auto* vertex_at = vertices.mutable_data_ptr<int64_t>();
  for (int64_t vertex = 0; vertex < pattern.vertices; ++vertex) {
    for (int64_t k = pattern.start[vertex]; k < pattern.start[vertex + 1]; ++k) {
      vertex_at[place[pattern.member[k]]++] = vertex;
    }
  }
  return {starts_of_targets, vertices};
}

std::tuple<at::Tensor, at::Tensor> bucket(const at::Tensor& keys, int64_t count) {
  check_indices("bucket", "keys", keys);
  TORCH_CHECK(keys.is_cpu(), "bucket: keys must be on the CPU, got ", keys.device());
  check_range("bucket", "keys", keys, count);
  const auto* key = keys.const_data_ptr<int64_t>();
  at::Tensor starts = starts_of(key, keys.numel(), count);
  at::Tensor order = at::empty({keys.numel()}, at::kLong);
  const auto* start = starts.const_data_ptr<int64_t>();
  std::vector<int64_t> place(start, start + count);  // the position of the next occurrence of each key
  auto* place_at = order.mutable_data_ptr<int64_t>();
  for (int64_t k = 0; k < keys.numel(); ++k) {
    place_at[place[key[k]]++] = k;
  }
  return {order, starts};
}

}  // namespace fastgrad
