// The rank's side of bench_step: trains when its team (team.h) asks, and answers with the times.
//
// The protocol of a team: Lines of text over the rank's stdin and stdout. The rank begins with
// "ready". It answers "train N" with N lines of five numbers, the seconds of a StepTimes, and "footprint"
// with the numbers of a Footprint. It ends when stdin ends.
#pragma once

#include "benchmarks/trainee.h"

namespace tessera::benchmarks {

/// Collective, except in the modes that train alone. Returns when stdin ends. Throws what training throws.
void serve(const Task& task);

}  // namespace tessera::benchmarks
