const AXIS = 62, TOP = 10, HEIGHT = 220, NAMES = 96, LEAST = 3.6, MOST = 118;

/* A picture with a column for each layer or group. It pans by itself where columns need more room than there is.

   `options`: names, height, mark (room below the columns), axis ([y, words] …) and its title, words (for those who cannot see it),
   tools, draw(plot, step), describe(place), groupsOf(place), placesOf(groups). */
function columns(view, place, options) {
  const {names, height = HEIGHT, mark = 4} = options;
  const room = Math.max(place.clientWidth - AXIS, 120);
  const step = clamp(room / names.length, isPrinting() ? 0 : LEAST, MOST);
  const width = Math.max(Math.ceil(step * names.length), 60), foot = TOP + height + mark;
  const axis = svg('svg', {width: AXIS, height: foot + NAMES, class: 'axis', 'aria-hidden': 'true'});
  const plot = picture(width, foot + NAMES, options.words), lights = svg('g', {});
  axis.append(sideways(options.title, 12, TOP + height / 2));
  for (const [y, words] of options.axis) {
    axis.append(label(words, AXIS - 6, TOP + y + 4, 'end'));
    plot.append(line(0, TOP + y, width, TOP + y, 'grid'));
  }
  plot.append(lights);
  options.draw(plot, step);
  plot.append(line(0, TOP + height, width, TOP + height, 'base'), ...nameTexts(names, step, foot));
  const pan = html('div', {class: width > room ? 'pan' : 'pan still'}, plot);
  picking(plot, names.length, x => Math.floor(x / step), {
    point: (each, x, y) => { tip.show(options.describe(each), x, y); view.light(options.groupsOf(each)); },
    leave: () => { tip.hide(); view.light(view.pinned === null ? [] : [view.pinned]); },
    pick: each => view.pin(options.groupsOf(each)[0]),
    where: each => (each + 0.5) * step,
    reveal: each => {
      const hidden = each * step < pan.scrollLeft || (each + 1) * step > pan.scrollLeft + pan.clientWidth;
      if (hidden) pan.scrollLeft = each * step - pan.clientWidth / 2;
    },
  });
  const tools = html('div', {class: 'tools'}, ...options.tools);
  place.replaceChildren(html('figure', {}, tools, html('div', {class: 'plot'}, axis, pan)));
  view.lights.set(place, groups => lights.replaceChildren(
    ...options.placesOf(groups).map(each => rect(each * step, 0, step, foot, 'hl'))));
}

/* Names under the columns, as many as there is room for. */
function nameTexts(names, step, top) {
  const every = Math.max(Math.ceil(13 / step), 1), start = sharedStart(names);
  return names.flatMap((name, place) => {
    if (place % every) return [];
    const x = (place + 0.5) * step + 4, own = name.slice(start), short = own.length > 17 ? '…' + own.slice(-16) : own;
    return [label(short, x, top + 10, 'end', {transform: `rotate(-55 ${x} ${top + 10})`})];
  });
}

/* How many letters all names begin with, up to a dot. */
function sharedStart(names) {
  const first = names[0];
  let length = first.lastIndexOf('.') + 1;
  while (length && !names.every(name => name.startsWith(first.slice(0, length)))) {
    length = first.lastIndexOf('.', length - 2) + 1;
  }
  return length;
}

/* Many rectangles as one path. */
function box(...numbers) {
  const [x, y, wide, high] = numbers.map(number => number.toFixed(1));
  return `M${x} ${y}h${wide}v${high}H${x}z`;
}
