const shown = (run, value) => run.quality.percent ? in_percent(value.toFixed(2)) : plain(value);
const tick = run => value => run.quality.percent ? in_percent(plain(value)) : plain(value);
const withError = (run, point) =>
  point.error ? `${point.value.toFixed(2)} ± ${in_percent(point.error.toFixed(2))}` : shown(run, point.value);

/* Quality against MACs: a colour for each criterion, a shape for each stage, a small dot for what was measured between. */
function drawQuality(place, runs) {
  const points = qualityPoints(runs), first = runs.find(run => run.quality.name), name = first.quality.name;
  const ends = points.flatMap(point => [point.value - (point.error || 0), point.value + (point.error || 0)]);
  const paths = runs.map(run => run.quality.path);
  const macs = [...points.map(point => point.macs), ...paths.flat().map(point => point[0])];
  const least = Math.max(Math.min(...macs) - 0.08, 0);
  const [low, high] = aired([...ends, ...paths.flat().map(point => point[1])], 0.12);
  const {plot, across, up} = frame(place, {
    height: 300, x: [least, 1.03], y: [first.quality.percent ? Math.max(low, 0) : low, high], xName: 'MACs left',
    yName: capital(name), words: `${name} against MACs left`, xFormat: value => percent(value, 0), yFormat: tick(first),
  });
  const spots = points.map(point => ({point, x: across(point.macs), y: up(point.value)}))
    .sort((one, other) => one.x - other.x || one.y - other.y);
  runs.forEach(run => plot.append(...pathShapes(run, across, up)));
  plot.append(...errorBars(spots, up), ...qualityJoins(spots), ...spots.map(spotShape));
  const ring = svg('g', {});
  plot.append(ring);
  picking(plot, spots.length, (x, y) => nearest(spots, spot => Math.hypot(spot.x - x, spot.y - y)), {
    point(each, px, py) {
      ring.replaceChildren(svg('circle', {cx: spots[each].x, cy: spots[each].y, r: 10, class: 'cross', fill: 'none'}));
      tip.show(qualityLines(spots[each].point), px, py);
    },
    leave() { ring.replaceChildren(); tip.hide(); },
    where: each => spots[each].x,
  });
  const legend = html('div', {class: 'tools'}, ...keys(qualityLegend(runs, points)));
  const title = place.closest('article') ? html('h3', {}, capital(name)) : null;
  place.replaceChildren(html('figure', {}, ...[title, legend, plot].filter(Boolean)));
}

/* All that is known; an unpruned network that several runs began with stands there once. */
function qualityPoints(runs) {
  const found = runs.flatMap(run => run.quality.points.map(point => ({...point, run})));
  const same = (one, other) => one.stage === 'unpruned' && other.stage === 'unpruned' && one.value === other.value;
  return found.filter((point, each) => found.findIndex(other => other === point || same(other, point)) === each);
}

function qualityLines(point) {
  const {stage, run, macs} = point, numbers = `${withError(run, point)} with ${percent(macs)} of the MACs`;
  return stage === 'unpruned' ? ['unpruned', numbers] : [`${run.name}, ${stage}`, run.criterion, numbers];
}

function qualityLegend(runs, points) {
  const shapes = {unpruned: ['f-ink', 'diamond'], pruned: ['hollow s1', 'ring'], 'fine-tuned': ['f1', 'ring']};
  const stages = Object.entries(shapes).filter(([stage]) => points.some(point => point.stage === stage));
  const criteria = [...new Set(runs.map(run => run.criterion))];
  return [
    ...criteria.map(criterion => [`s${criterionColour({criterion})}`, criterion, 'line']),
    ...stages.map(([stage, [name, shape]]) => [name, stage, shape]),
    ...(points.some(point => point.error) ? [['bars', '± standard error', 'error']] : []),
  ];
}

const criterionColour = run => colour(criterionPlace(run));

/* Where the network went through on its way, if something was measured there. */
function pathShapes(run, across, up) {
  const path = run.quality.path, name = criterionColour(run);
  if (path.length < 3) return [];
  const d = path.map(([macs, value], each) => `${each ? 'L' : 'M'}${across(macs).toFixed(1)} ${up(value).toFixed(1)}`);
  return [svg('path', {d: d.join(''), class: `curve thin s${name}`}),
    ...path.slice(1).map(([macs, value]) => dot(across(macs), up(value), 2.5, `f${name}`))];
}

const errorBars = (spots, up) => spots.filter(spot => spot.point.error).map(({point, x}) =>
  line(x, up(point.value - point.error), x, up(point.value + point.error), 'bars'));

function spotShape({point, x, y}) {
  if (point.stage === 'unpruned') {
    return svg('path', {d: `M${x} ${y - 7}L${x + 7} ${y}L${x} ${y + 7}L${x - 7} ${y}Z`, class: 'f-ink'});
  }
  const name = criterionColour(point.run);
  return dot(x, y, 5.5, point.stage === 'pruned' ? `hollow s${name}` : `f${name}`);
}

/* From each pruned network to the fine-tuned one, and along the runs of a criterion at several budgets. */
function qualityJoins(spots) {
  const join = (one, other, dash) => line(one.x, one.y, other.x, other.y, `s${criterionColour(one.point.run)}`,
    {'stroke-width': 1.5, 'stroke-dasharray': dash});
  const tuned = run => spots.find(spot => spot.point.run === run && spot.point.stage === 'fine-tuned');
  const pruned = spots.filter(spot => spot.point.stage === 'pruned');
  const risen = pruned.filter(spot => tuned(spot.point.run)).map(spot => join(spot, tuned(spot.point.run), '2 3'));
  const along = [...new Set(DATA.runs.map(run => run.criterion))].flatMap(criterion => {
    const alike = pruned.filter(spot => spot.point.run.criterion === criterion);
    const own = alike.map(spot => tuned(spot.point.run) || spot);
    const steps = own.slice(1).map((spot, each) => [own[each], spot]);
    return steps.filter(([one, other]) => other.point.macs - one.point.macs > 0.02).map(pair => join(...pair));
  });
  return [...risen, ...along];
}

/* The quality of several runs in the end: a row for each criterion, a dot for each run, mean and standard deviation. */
function drawDots(place, runs) {
  const groups = DATA.groups, row = 34, first = runs.find(run => run.quality.name);
  const start = runs.flatMap(run => run.quality.points).find(point => point.stage === 'unpruned');
  const ends = groups.flatMap(([, values, mean, deviation]) =>
    [...values.map(pair => pair[1]), mean - (deviation || 0), mean + (deviation || 0)]);
  const [low, high] = aired(start ? [...ends, start.value] : ends, 0.08);
  const width = Math.max(place.clientWidth, 220), left = Math.min(150, width * 0.36), foot = TOP + row * groups.length;
  const across = linear(low, high, left, width - 20);
  const plot = picture(width, foot + 40, `${first.quality.name} of ${runs.length} runs by criterion`);
  for (const value of ticks(low, high, Math.max(Math.floor((width - left) / 90), 3))) {
    plot.append(line(across(value), TOP, across(value), foot, 'grid'));
    plot.append(label(tick(first)(value), across(value), foot + 16));
  }
  if (start) plot.append(line(across(start.value), TOP, across(start.value), foot, 'target'));
  plot.append(label(capital(first.quality.name), (left + width - 20) / 2, foot + 34));
  const spots = groups.flatMap((group, each) => rowShapes(plot, group, TOP + row * (each + 0.5), {left, across, runs}));
  const ring = svg('g', {});
  plot.append(ring);
  picking(plot, spots.length, (x, y) => nearest(spots, spot => Math.hypot(spot.x - x, spot.y - y)), {
    point(each, px, py) {
      const {x, y, run, value, words} = spots[each];
      ring.replaceChildren(svg('circle', {cx: x, cy: y, r: 9, class: 'cross', fill: 'none'}));
      tip.show([run.name, shown(run, value), words], px, py);
    },
    leave() { ring.replaceChildren(); tip.hide(); },
    where: each => spots[each].x,
  });
  const legend = [['f1', 'a run', 'ring'], ['mean', 'mean', 'tall'], ['bars', 'standard deviation', 'line']];
  if (start) legend.push(['target', 'unpruned', 'tall']);
  place.replaceChildren(html('figure', {}, html('div', {class: 'tools'}, ...keys(legend)), plot));
}

function rowShapes(plot, [name, values, mean, deviation], y, {left, across, runs}) {
  const short = name.length > left / 6.4 ? `${name.slice(0, Math.floor(left / 6.4) - 1)}…` : name;
  plot.append(label(short, left - 12, y + 4, 'end'));
  if (deviation !== null) {
    plot.append(line(across(mean - deviation), y, across(mean + deviation), y, 'bars'));
    plot.append(line(across(mean), y - 10, across(mean), y + 10, 'mean'));
  }
  const one = runs[values[0][0]], several = `${name}: mean of ${values.length} runs ${shown(one, mean)}`;
  const words = deviation === null ? name : `${several}, standard deviation ${plain(deviation)}`;
  return values.map(([number, value]) => {
    const run = runs[number], x = across(value);
    plot.append(dot(x, y, 5, `f${criterionColour(run)} seen`));
    return {x, y, run, value, words};
  });
}
