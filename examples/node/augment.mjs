// What a recipe's `augment` makes of a batch, as docs/PROTOCOL.md has it. Runs in Node and in a page.

const [ANGLE, SCALE, JITTER, SHIFT] = [(15 * Math.PI) / 180, 0.1, 0.05, 0.1];
const { fround } = Math;

/** For each of `count` samples from which of `size` places a place takes its value: shifted by at most `reach`. */
function shifted(count, size, reach, draws) {
  const clipped = (at) => Math.min(Math.max(at, 0), size - 1);
  return draws.integers(-reach, reach + 1, count).map((by) => Int32Array.from({ length: size }, (_, at) => clipped(at + by)));
}

/** Float32 rotations about random axes, row by row, by an angle uniform in ±15 degrees (Rodrigues' formula). */
function rotations(count, draws) {
  const axes = draws.normal(3 * count);
  return Array.from(draws.uniform(count), (share, i) => {
    const length = Math.hypot(...axes.subarray(3 * i, 3 * i + 3));
    const [x, y, z] = Array.from(axes.subarray(3 * i, 3 * i + 3), (one) => one / length);
    const angle = (2 * share - 1) * ANGLE;
    const [sine, rest] = [Math.sin(angle), 1 - Math.cos(angle)];
    const cross = [0, -z, y, z, 0, -x, -y, x, 0];
    const squared = cross.map((_, at) => [0, 1, 2].reduce((sum, k) => sum + cross[at - (at % 3) + k] * cross[3 * k + (at % 3)], 0));
    return Float32Array.from(cross, (one, at) => (at % 4 ? 0 : 1) + sine * one + rest * squared[at]);
  });
}

/** Another way of wearing the same sensors: windows (N, 3k, time) turned, scaled, shifted and with noise. */
function imu(x, draws) {
  const [count, channels, time] = x.shape;
  if (x.shape.length !== 3 || channels % 3) throw new Error(`augment imu: x has shape ${x.shape}, need (N, 3k, time); use none`);
  const turns = rotations(count, draws);
  const gains = draws.normal((count * channels) / 3).map((one) => fround(1 + SCALE * one));
  const places = shifted(count, time, Math.floor(SHIFT * time), draws);
  const noise = draws.normal(x.data.length);
  const data = x.data.map((_, flat) => {
    const [row, at] = [Math.floor(flat / time), flat % time];
    const [sample, channel] = [Math.floor(row / channels), row % channels];
    const [turn, first] = [turns[sample], row - (channel % 3)];
    let sum = 0;
    for (let k = 0; k < 3; k++) {
      sum = fround(sum + fround(turn[3 * (channel % 3) + k] * x.data[(first + k) * time + places[sample][at]]));
    }
    return fround(fround(sum * gains[Math.floor(row / 3)]) + fround(JITTER * noise[flat]));
  });
  return { ...x, data };
}

/** Images (N, C, H, W) shifted by up to an eighth of each side, mirrored left to right half the time. */
function cropFlip(x, draws) {
  const [count, channels, height, width] = x.shape;
  if (x.shape.length !== 4) throw new Error(`augment crop_flip: x has shape ${x.shape}, need (N, C, H, W); use none`);
  const rows = shifted(count, height, Math.floor(height / 8), draws);
  const columns = shifted(count, width, Math.floor(width / 8), draws);
  draws.uniform(count).forEach((share, i) => share < 0.5 && columns[i].reverse());
  const data = x.data.map((_, flat) => {
    const [line, across] = [Math.floor(flat / width), flat % width];
    const [map, down] = [Math.floor(line / height), line % height];
    const sample = Math.floor(map / channels);
    return x.data[(map * height + rows[sample][down]) * width + columns[sample][across]];
  });
  return { ...x, data };
}

/** By name; each gives a new batch, drawn from `draws` alone. */
export const AUGMENTATIONS = { none: (x) => x, imu, crop_flip: cropFlip };
