const PLOT = {left: 66, right: 14, top: 10, bottom: 42};
const COSTS = {macs: 'MACs', params: 'parameters', activations: 'activations', latency: 'latency (model)'};

/* Axes and scales of a picture: x and y are [low, high]. */
function frame(place, {height, x, y, xName, yName, xFormat, yFormat, words}) {
  const {left, right, top, bottom} = PLOT, width = Math.max(place.clientWidth, 220), foot = height - bottom;
  const across = linear(x[0], x[1], left, width - right), up = linear(y[0], y[1], foot, top);
  const plot = picture(width, height, words);
  for (const value of ticks(y[0], y[1], 4)) {
    plot.append(line(left, up(value), width - right, up(value), 'grid'));
    plot.append(label(yFormat(value), left - 6, up(value) + 4, 'end'));
  }
  for (const value of ticks(x[0], x[1], Math.max(Math.floor(width / 90), 4))) {
    const text = xFormat(value);
    if (text) plot.append(label(text, across(value), foot + 16));
  }
  plot.append(line(left, foot, width - right, foot, 'base'), label(xName, (left + width - right) / 2, height - 6),
    sideways(yName, 12, (top + foot) / 2));
  const level = (value, name, words_) => [
    line(left, up(value), width - right, up(value), name),
    label(words_, left + 4, up(value) + (up(value) + 18 > foot ? -5 : 13), 'start'),
  ];
  return {plot, across, up, foot, level};
}

/* The range of numbers with some air around it. */
function aired(values, air = 0.05) {
  const low = Math.min(...values), high = Math.max(...values), pad = (high - low || Math.abs(high) || 1) * air;
  return [low - pad, high + pad];
}

/* Curves over a common x axis, with a cross hair that tells the numbers. */
function curves(place, options) {
  const {title, x, xName, xFormat = value => Number.isInteger(value) ? plain(value) : '', format = plain, levels = []} = options;
  const xWords = options.xWords || plain;
  const series = options.series.filter(each => each.values.some(value => value !== null));
  if (!series.length) return place.replaceChildren(html('p', {class: 'note'}, `${title}: not recorded.`));
  const numbers = [...series.flatMap(each => each.values), ...levels.map(each => each[1])].filter(each => each !== null);
  const {plot, across, up, foot, level} = frame(place, {
    height: 250, x: [x[0], x[x.length - 1]], y: options.range || aired(numbers), xName,
    xFormat, yFormat: format, yName: title,
    words: `${title}: ${series.map(each => each.name).join(', ')} over ${xName}`,
  });
  for (const [words, value] of levels) plot.append(...level(value, 'target', `${words} ${format(value)}`));
  for (const each of series) plot.append(...curve(each, x, across, up));
  const cross = svg('g', {});
  plot.append(cross);
  const places = x.map(across);
  picking(plot, x.length, pixel => nearest(places, each => Math.abs(each - pixel)), {
    point(point, px, py) {
      const known = series.filter(each => each.values[point] !== null);
      const dots = known.map(each => dot(places[point], up(each.values[point]), 3.5, `f${each.colour}`));
      cross.replaceChildren(line(places[point], PLOT.top, places[point], foot, 'cross'), ...dots);
      const also = options.also ? options.also(point) : [];
      const values = known.map(each => `${each.name}: ${format(each.values[point])}`);
      tip.show([`${xName} ${xWords(x[point])}`, ...values, ...also], px, py);
    },
    leave() { cross.replaceChildren(); tip.hide(); },
    where: point => places[point],
  });
  const legend = html('div', {class: 'tools'}, ...keys(series.map(each => [`s${each.colour}`, each.name, 'line'])));
  place.replaceChildren(html('figure', {}, html('h3', {}, title), legend, plot));
}

function curve(series, x, across, up) {
  const points = series.values.flatMap((value, each) => value === null ? [] : [[across(x[each]), up(value)]]);
  const d = points.map(([px, py], each) => `${each ? 'L' : 'M'}${px.toFixed(1)} ${py.toFixed(1)}`).join('');
  const path = svg('path', {d, class: `curve s${series.colour}`, 'stroke-dasharray': series.dash});
  const dots = points.length === 1 || series.dots ? points.map(point => dot(...point, 3.5, `f${series.colour}`)) : [];
  return points.length === 1 ? dots : [path, ...dots];
}

function nearest(things, distance) {
  let best = 0;
  things.forEach((thing, each) => { if (distance(thing) < distance(things[best])) best = each; });
  return best;
}

function drawCosts(view, place) {
  const {curve: {removal, shares}, targets} = view.run;
  const kinds = Object.keys(shares), asked = kinds.filter(kind => kind in targets);
  const series = kinds.map((kind, each) => ({name: COSTS[kind], values: shares[kind], colour: colour(each)}));
  const levels = asked.map(kind => [`${COSTS[kind]} asked:`, targets[kind]]);
  const format = share => percent(share, 0);
  curves(place, {title: 'Share kept', x: removal, series, xName: 'Removal', format, range: [0, 1], levels});
}

function drawLoss(view, place) {
  const {removal, loss, seconds} = view.run.curve, series = [{name: 'loss', values: loss, colour: 2}];
  const also = point => seconds[point] === null ? [] : [`after ${plain(seconds[point])} s`];
  curves(place, {title: 'Loss', x: removal, series, xName: 'Removal', also});
}

function drawEpochs(view, place) {
  const {epoch, quality, name, before} = view.run.tuning;
  if (quality === null) return place.replaceChildren(html('p', {class: 'note'}, 'No accuracy was measured.'));
  const series = [{name, values: quality, colour: 1}], format = value => in_percent(plain(value));
  const levels = 'unpruned' in before ? [['unpruned', before.unpruned]] : [];
  curves(place, {title: capital(name), x: epoch, series, xName: 'Epoch', format, levels});
}

function drawTraining(view, place) {
  const {epoch, loss, eval_loss, lr} = view.run.tuning;
  const series = [
    {name: 'training', values: loss, colour: 2},
    {name: 'evaluation', values: eval_loss, colour: 1, dash: '6 3'},
  ];
  const also = point => lr[point] === null ? [] : [`learning rate ${plain(lr[point])}`];
  curves(place, {title: 'Loss', x: epoch, series, xName: 'Epoch', also});
}

/* The loss after each stage, against the MACs that it left. */
function drawStages(view, place) {
  const points = [...view.run.losses].sort((one, other) => one[0] - other[0]), wide = value => percent(value, 0);
  curves(place, {title: 'Loss', x: points.map(point => point[0]), xName: 'MACs left', xFormat: wide, xWords: percent,
    series: [{name: 'loss after a stage', values: points.map(point => point[1]), colour: 2, dots: true}]});
}
