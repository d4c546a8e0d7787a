/* What is known of the group that was picked: its units in order, its scores, its members. */
function drawDetail(view) {
  const place = view.article.querySelector('[data-detail]');
  if (!place) return;
  place.replaceChildren();
  if (view.pinned === null) return;
  const group = view.run.groups[view.pinned], flags = group.flags.length ? `, flags: ${group.flags.join(', ')}` : '';
  const words = `${kept(group.kept, group.size, 'units')}${flags}. Each square is a unit: blue is kept, orange was removed; `
    + 'the stronger the orange, the sooner.';
  const close = html('button', {type: 'button'}, 'Close');
  close.addEventListener('click', () => view.pin(null));
  place.append(
    html('h3', {}, `Group ${group.name}`),
    html('p', {class: 'note'}, words),
    unitStrip(view.run, group, place.parentElement.clientWidth - 40),
    ...scoreSpans(view.run, group).map(line => html('p', {class: 'note'}, capital(line))),
    memberList(group),
    close,
  );
}

function unitStrip(run, group, room) {
  const when = bytes(group.when), size = clamp(Math.floor(room / Math.min(when.length, 64)), 9, 18);
  const wide = clamp(Math.floor(room / size), 1, when.length), rows = Math.ceil(when.length / wide);
  const cells = Array.from(when, (moment, unit) => {
    const known = moment > 0 && moment < 255;
    const went = known ? `removed near removal ${removalAt(run, moment)}` : 'removed';
    const cell = rect(unit % wide * size, Math.floor(unit / wide) * size, size - 1, size - 1,
      moment ? 'f-gone' : 'f-left', {rx: 1, 'fill-opacity': known ? 1 - 0.75 * (moment - 1) / 249 : 1});
    cell.append(svg('title', {}, `unit ${unit}: ${moment ? went : 'kept'}`));
    return cell;
  });
  const words = `${group.size} units, ${group.kept} kept`;
  return svg('svg', {width: wide * size, height: rows * size, role: 'img', 'aria-label': words}, ...cells);
}

function memberList(group) {
  const items = group.members.map(member => html('li', {}, member));
  const title = html('summary', {}, `Layers that take part: ${items.length}`);
  return html('details', {}, title, html('ul', {class: 'members'}, ...items));
}
