/* Accuracy against MACs: a colour for each criterion, a shape for each stage. */
function drawWorth(place, runs) {
  const points = worthPoints(runs), name = runs.map(run => run.points.name).find(Boolean) || 'accuracy';
  const least = Math.max(Math.min(...points.map(point => point.macs)) - 0.08, 0);
  const [low, high] = aired(points.map(point => point.worth), 0.12), shares = runs.some(run => run.points.percent);
  const {plot, across, up} = frame(place, {
    height: 300, x: [least, 1.03], y: [shares ? Math.max(low, 0) : low, high], xName: 'MACs left', words: `${name} against MACs left`,
    xFormat: value => percent(value, 0), yFormat: value => shares ? in_percent(plain(value)) : plain(value),
  });
  const spots = points.map(point => ({point, x: across(point.macs), y: up(point.worth)}))
    .sort((one, other) => one.x - other.x || one.y - other.y);
  plot.append(...worthJoins(spots), ...spots.map(spotShape));
  const ring = svg('g', {});
  plot.append(ring);
  picking(plot, spots.length, (x, y) => nearest(spots, spot => Math.hypot(spot.x - x, spot.y - y)), {
    point(each, px, py) {
      ring.replaceChildren(svg('circle', {cx: spots[each].x, cy: spots[each].y, r: 10, class: 'cross', fill: 'none'}));
      tip.show(worthLines(spots[each].point), px, py);
    },
    leave() { ring.replaceChildren(); tip.hide(); },
    where: each => spots[each].x,
  });
  place.replaceChildren(html('figure', {}, html('div', {class: 'tools'}, ...keys(worthLegend(runs, points))), plot));
}

/* All that is known; an unpruned network that several runs began with stands there once. */
function worthPoints(runs) {
  const found = runs.flatMap(run => run.points.points.map(point => ({...point, run})));
  const same = (one, other) => one.stage === 'unpruned' && other.stage === 'unpruned' && one.worth === other.worth;
  return found.filter((point, each) => found.findIndex(other => other === point || same(other, point)) === each);
}

function worthLines({stage, run, worth, macs}) {
  const value = run.points.percent ? in_percent(worth.toFixed(2)) : plain(worth);
  const numbers = `${value} with ${percent(macs)} of the MACs`;
  return stage === 'unpruned' ? ['unpruned', numbers] : [`${run.name}, ${stage}`, run.criterion, numbers];
}

function worthLegend(runs, points) {
  const shapes = {unpruned: ['f-ink', 'diamond'], pruned: ['hollow s1', 'ring'], 'fine-tuned': ['f1', 'ring']};
  const stages = Object.entries(shapes).filter(([stage]) => points.some(point => point.stage === stage));
  const criteria = [...new Set(runs.map(run => run.criterion))];
  return [
    ...criteria.map((criterion, each) => [`s${colour(each)}`, criterion, 'line']),
    ...stages.map(([stage, [name, shape]]) => [name, stage, shape]),
  ];
}

function spotShape({point, x, y}) {
  if (point.stage === 'unpruned') {
    return svg('path', {d: `M${x} ${y - 7}L${x + 7} ${y}L${x} ${y + 7}L${x - 7} ${y}Z`, class: 'f-ink'});
  }
  const number = colour(criterionPlace(point.run));
  return dot(x, y, 5.5, point.stage === 'pruned' ? `hollow s${number}` : `f${number}`);
}

/* From each pruned network to the fine-tuned one, and along the runs of a criterion at several budgets. */
function worthJoins(spots) {
  const join = (one, other, dash) => line(one.x, one.y, other.x, other.y, `s${colour(criterionPlace(one.point.run))}`,
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
