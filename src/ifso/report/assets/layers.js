const criterionPlace = run => [...new Set(DATA.runs.map(each => each.criterion))].indexOf(run.criterion);
const kept = (number, of, what) => `${number} of ${of} ${what} kept (${percent(number / of)})`;
const ofGroups = {groupsOf: each => [each], placesOf: groups => groups};
const SHADES = 5, SHADE = level => 0.25 + 0.75 * level / (SHADES - 1), LIMITS = [0.02, 0.05, 0.1, 0.2];

/* What each layer is measured by: its number before and after, and the numbers on the axis. */
const MEASURES = [
  {name: 'Share kept', of: layer => [1, layer[1] && layer[2] / layer[1]], format: value => percent(value, 0)},
  {name: 'Channels', of: layer => [layer[1], layer[2]], format: String},
  {name: 'Parameters', of: layer => layer[4], format: amount},
  {name: 'MACs', of: layer => layer[5], format: amount},
];

/* What is left of each layer: Fig. 3 and 4 of the paper. */
function drawLayers(view, place) {
  const run = view.run, layers = run.layers, couples = Object.keys(run.coupled).length > 0;
  const known = MEASURES.filter(each => layers.some(each.of)), measure = known[view.measure];
  const pairs = layers.map(layer => measure.of(layer) || [0, 0]);
  const most = Math.max(...pairs.map(pair => pair[0])) || 1, y = linear(0, most, HEIGHT, 0);
  const legend = [['f-left', 'kept'], ['f-whole', 'removed']];
  if (layers.some(layer => !layer[3].length)) legend.push(['f-frozen', 'not prunable']);
  if (couples) legend.push(['f3', 'coupled: layers with the same number lose the same channels']);
  columns(view, place, {
    names: layers.map(layer => layer[0]), mark: couples ? 20 : 4, title: measure.name,
    words: `${measure.name} of ${layers.length} layers. Arrow keys move, Enter shows the units.`,
    axis: ticks(0, most, 4).map(value => [y(value), measure.format(value)]),
    draw: (plot, step) => pairs.forEach((pair, each) => plot.append(...layerBars(view, each, step, pair.map(y)))),
    tools: [...keys(legend), choices(known.map(each => each.name), view.measure, which => {
      view.measure = which;
      drawLayers(view, place);
    })],
    describe: each => layerLines(run, each),
    groupsOf: each => layers[each][3],
    placesOf: groups => layers.flatMap((layer, each) => layer[3].some(one => groups.includes(one)) ? [each] : []),
  });
}

function layerBars(view, each, step, [whole, left]) {
  const groups = view.run.layers[each][3], gap = step > 10 ? 2 : step > 5 ? 1 : 0.4;
  const x = each * step + gap / 2, size = Math.max(step - gap, 0.5);
  const bar = (y, name) => rect(x, TOP + y, size, Math.max(HEIGHT - y, 0), name);
  const bars = [bar(whole, 'f-whole'), bar(left, groups.length ? 'f-left' : 'f-frozen')];
  const number = groups.map(group => view.run.coupled[group]).find(found => found !== undefined);
  if (number === undefined) return bars;
  const mark = rect(x, TOP + HEIGHT + 4, size, 13, `f${colour(number - 1)}`, {rx: 2});
  const words = step >= 12 ? [label(number, x + size / 2, TOP + HEIGHT + 14, 'middle', {class: 'on'})] : [];
  return [...bars, mark, ...words];
}

function layerLines(run, place) {
  const [name, channels, left, groups, params, macs] = run.layers[place];
  const lines = [name, kept(left, channels, 'channels')];
  const share = ([before, after]) => `${count(after)} of ${count(before)}${before ? ` (${percent(after / before)})` : ''}`;
  lines.push(`parameters: ${share(params)}`);
  if (macs) lines.push(`MACs: ${share(macs)}`);
  if (!groups.length) return [...lines, 'not prunable: see “What cannot be pruned, and why”'];
  for (const each of groups) {
    const group = run.groups[each];
    const others = run.layers.filter(layer => layer[0] !== name && layer[3].includes(each)).map(layer => layer[0]);
    const some = others.slice(0, 4).join(', ') + (others.length > 4 ? ` and ${others.length - 4} more` : '');
    lines.push(`group ${group.name}${others.length ? `, coupled with ${some}` : ''}`);
    if (group.flags.length) lines.push(`flags: ${group.flags.join(', ')}`);
  }
  return lines;
}

const groupLines = group => [group.name, kept(group.kept, group.size, 'units')];

/* How scores are distributed in each group: kept units to the left, removed ones to the right. */
function drawScores(view, place) {
  const run = view.run, {low, high, first} = run.scale, bins = 44, y = linear(low, high, HEIGHT, 0);
  const powers = ticks(Math.ceil(low - 1e-9), high, 5).filter(Number.isInteger);
  const ends = [[0, plain(10 ** high)], [HEIGHT, plain(10 ** low)]];
  columns(view, place, {
    names: run.groups.map(group => group.name),
    words: `Scores of the units of ${run.groups.length} groups on a logarithmic scale.`,
    title: 'Score',
    axis: powers.length ? powers.map(power => [y(power), `1e${power}`]) : ends,
    draw(plot, step) {
      const parts = run.groups.map((group, each) => scoreShapes(scoreCounts(group, bins, first), each, step));
      for (const [kind, name] of [['kept', 'f-left'], ['gone', 'f-gone']]) {
        plot.append(svg('path', {d: parts.map(part => part[kind]).join(''), class: name}));
      }
    },
    tools: keys([['f-left', 'kept'], ...(first ? [['f-gone', 'removed']] : [])]),
    describe: each => [...groupLines(run.groups[each]), ...scoreSpans(run, run.groups[each])],
    ...ofGroups,
  });
}

function scoreShapes(counts, each, step) {
  const bins = counts.kept.length, thick = HEIGHT / bins, middle = (each + 0.5) * step;
  const most = Math.max(...counts.kept, ...counts.gone, 1), half = step / 2 - Math.min(step * 0.08, 2);
  const shapes = (found, sign) => found.map((count, bin) => {
    if (!count) return '';
    const wide = Math.max(half * Math.sqrt(count / most), 0.6);
    return box(sign < 0 ? middle - wide : middle, TOP + HEIGHT - (bin + 1) * thick, wide, thick - 0.4);
  }).join('');
  return {kept: shapes(counts.kept, -1), gone: shapes(counts.gone, 1)};
}

/* How many kept and removed units have a score in each of the bins. */
function scoreCounts(group, bins, first) {
  const counts = {kept: new Array(bins).fill(0), gone: new Array(bins).fill(0)};
  if (group.scores === null) return counts;
  const when = bytes(group.when);
  bytes(group.scores).forEach((level, unit) => {
    if (when[unit] && !first) return;
    const bin = level ? Math.min(Math.floor((level - 1) / 250 * bins), bins - 1) : 0;
    counts[when[unit] ? 'gone' : 'kept'][bin] += 1;
  });
  return counts;
}

function scoreSpans(run, group) {
  if (!run.scale || group.scores === null) return [];
  const {low, high, first} = run.scale, levels = bytes(group.scores), when = bytes(group.when);
  const score = level => level ? (10 ** (low + (level - 1) / 249 * (high - low))).toPrecision(2) : '0';
  const words = (name, gone) => {
    const found = levels.filter((_, unit) => Boolean(when[unit]) === gone).sort();
    if (!found.length) return [];
    const [least, median, most] = [found[0], found[found.length >> 1], found[found.length - 1]].map(score);
    return [`scores of ${name} units: ${least} to ${most}, median ${median}`];
  };
  return [...words('kept', false), ...(first ? words('removed', true) : [])];
}

/* The removal that a moment, 1 … 250, stands for. */
const removalAt = (run, moment) => Math.round(1 + (moment - 1) / 249 * (run.removals - 1));
const moments = group => bytes(group.when).filter(moment => moment && moment < 255);

/* A strip of heat for each group: when its units went. */
function drawOrder(view, place) {
  const run = view.run, bins = clamp(run.removals, 1, 44), macs = run.curve.shares.macs;
  const lastBy = share => run.curve.removal.findLastIndex(each => each <= run.removals * share);
  const left = share => share ? macs[Math.max(lastBy(share), 0)] : 1;
  columns(view, place, {
    names: run.groups.map(group => group.name),
    words: `Removed units of ${run.groups.length} groups by time.`,
    title: macs ? 'MACs left at that time' : 'Number of the removal',
    axis: [0, 0.25, 0.5, 0.75, 1].map(share =>
      [share * HEIGHT, macs ? percent(left(share), 0) : String(Math.round(share * run.removals))]),
    draw: (plot, step) => plot.append(...heat(run.groups, bins, step)),
    tools: [shades()],
    describe(each) {
      const found = moments(run.groups[each]).sort(), [first, last] = [found[0], found[found.length - 1]];
      const words = `first near removal ${removalAt(run, first)}, last near ${removalAt(run, last)} of ${run.removals}`;
      return [...groupLines(run.groups[each]), found.length ? words : 'no unit was removed'];
    },
    ...ofGroups,
  });
}

function heat(groups, bins, step) {
  const paths = Array.from({length: SHADES}, () => []), gap = step > 10 ? 1 : 0.3, thick = HEIGHT / bins;
  groups.forEach((group, each) => {
    const counts = new Array(bins).fill(0);
    for (const moment of moments(group)) counts[Math.min(Math.floor((moment - 1) / 249.001 * bins), bins - 1)] += 1;
    counts.forEach((count, bin) => {
      const level = LIMITS.filter(limit => count / group.size > limit).length;
      if (count) paths[level].push(box(each * step + gap / 2, TOP + bin * thick, step - gap, thick + 0.2));
    });
  });
  return paths.map((parts, level) => svg('path', {d: parts.join(''), class: 'f-gone', 'fill-opacity': SHADE(level)}));
}

function shades() {
  const cells = Array.from({length: SHADES}, (_, level) =>
    rect(level * 14, 0, 13, 12, 'f-gone', {'fill-opacity': SHADE(level)}));
  const scale = svg('svg', {width: 14 * SHADES, height: 12, 'aria-hidden': 'true'}, ...cells);
  return html('span', {class: 'key'}, 'below 2 %', scale, 'above 20 % of the group');
}

/* What several runs left of each layer: a row for each run. */
function drawSideBySide(view, place, runs) {
  const layers = runs[0].layers, row = 26;
  columns(view, place, {
    names: layers.map(layer => layer[0]), height: row * runs.length,
    title: 'Run',
    words: `Share of channels kept in ${layers.length} layers by ${runs.length} runs.`,
    axis: runs.map((_, each) => [(each + 0.5) * row, String(each + 1)]),
    draw: (plot, step) => runs.forEach((run, each) => run.layers.forEach(([, channels, left, groups], layer) => {
      const x = layer * step, wide = Math.max(step - 0.5, 0.5), top = TOP + each * row + 2, high = row - 4;
      const tall = high * left / channels, name = groups.length ? `f${colour(criterionPlace(run))}` : 'f-frozen';
      plot.append(rect(x, top, wide, high, 'f-whole'), rect(x, top + high - tall, wide, tall, name));
    })),
    tools: runs.map((run, each) => html('span', {}, `${each + 1}: ${run.name}`)),
    describe: each => [layers[each][0], ...runs.map(run =>
      `${run.name}: ${kept(run.layers[each][2], run.layers[each][1], 'channels')}`)],
    groupsOf: () => [],
    placesOf: () => [],
  });
}
