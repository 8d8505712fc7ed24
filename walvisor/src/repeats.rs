//! Lines on stderr are a resource: a stranger who connects again and again must not fill the disk
//! of whoever keeps them. The same warning is shown a few times a minute, and then counted.
//!
//! Two warnings are the same if the same place in the program wrote them, and their texts differ in
//! numbers only. Of one place a few texts are told apart, so that the trouble of one disk does not
//! hide another's.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata};
use tracing_subscriber::layer::{Context, Filter};

/// How long the same warning is counted together.
pub const MINUTE: Duration = Duration::from_secs(60);
/// How often it is shown in this time.
const SHOWN: u64 = 5;
/// How many texts of one place are told apart. Further ones count as one.
const TEXTS: usize = 64;

static REPEATS: Mutex<Option<Repeats>> = Mutex::new(None);

fn lock() -> MutexGuard<'static, Option<Repeats>> {
    // A count that is wrong by one does no harm.
    REPEATS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The filter of the layer that prints.
pub struct RepeatFilter;

impl<S> Filter<S> for RepeatFilter {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if *metadata.level() > Level::WARN {
            return true;
        }
        let mut message = Message(String::new());
        event.record(&mut message);
        let (place, level) = (metadata.callsite(), *metadata.level());
        let mut repeats = lock();
        let repeats = repeats.get_or_insert_default();
        let now = Instant::now();
        show(repeats.over(now));
        repeats.admit(place, level, message.0, now)
    }
}

/// Shows the counts whose minute is over; at the end of the process all of them.
pub fn flush(all: bool) {
    if let Some(repeats) = &mut *lock() {
        let now = Instant::now();
        show(repeats.over(if all { now + MINUTE } else { now }));
    }
}

fn show(lines: Vec<String>) {
    for line in lines {
        // Nobody may read it.
        let _ = writeln!(std::io::stderr(), "{line}");
    }
}

/// The message of an event.
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            let _ = write!(self.0, "{value:?}");
        }
    }
}

#[derive(Default)]
struct Repeats(HashMap<Identifier, HashMap<String, Repeat>>);

/// A warning, from the first time on that it is shown in a minute.
struct Repeat {
    level: Level,
    /// The text of the first.
    text: String,
    since: Instant,
    count: u64,
}

impl Repeats {
    /// Whether a warning is shown.
    fn admit(&mut self, place: Identifier, level: Level, text: String, now: Instant) -> bool {
        let texts = self.0.entry(place).or_default();
        let mut key = without_numbers(&text);
        if texts.len() >= TEXTS && !texts.contains_key(&key) {
            key = String::new();
        }
        let repeat = texts.entry(key).or_insert(Repeat {
            level,
            text,
            since: now,
            count: 0,
        });
        repeat.count += 1;
        repeat.count <= SHOWN
    }

    /// Forgets the warnings whose minute is over, and returns the lines that tell their counts.
    fn over(&mut self, now: Instant) -> Vec<String> {
        let over = |repeat: &Repeat| now.duration_since(repeat.since) >= MINUTE;
        let texts = self.0.values_mut();
        let ended = texts.flat_map(|texts| texts.extract_if(|_, repeat| over(repeat)));
        let lines = ended.filter_map(|(_, repeat)| {
            let hidden = repeat.count.checked_sub(SHOWN).filter(|count| *count > 0)?;
            let (level, text) = (repeat.level, repeat.text);
            Some(format!(
                "{level:>5} {hidden} more like this in the last minute: {text}"
            ))
        });
        lines.collect()
    }
}

/// The text with one 0 in place of each number. Those that end a word or begin a file's name stay:
/// they tell disks apart.
fn without_numbers(text: &str) -> String {
    let mut key = String::with_capacity(text.len());
    let (mut before, mut named) = (' ', false);
    for character in text.chars() {
        if !character.is_ascii_digit() {
            key.push(character);
        } else if before.is_ascii_digit() {
            if named {
                key.push(character);
            }
        } else {
            named = before.is_alphabetic() || "_-/".contains(before);
            key.push(if named { character } else { '0' });
        }
        before = character;
    }
    key
}

#[cfg(test)]
mod tests {
    use tracing::Callsite;
    use tracing::subscriber::Interest;

    use super::*;

    struct TestCallsite(u8);

    impl Callsite for TestCallsite {
        fn set_interest(&self, _: Interest) {}

        fn metadata(&self) -> &Metadata<'_> {
            unreachable!("{}", self.0)
        }
    }

    #[test]
    fn the_same_warning_is_shown_a_few_times_a_minute_and_counted() {
        static PLACE: TestCallsite = TestCallsite(0);
        let place = || Identifier(&PLACE);
        let mut repeats = Repeats::default();
        let start = Instant::now();
        let mut admit = |place, text: &str, now| {
            let shown = repeats.admit(place, Level::WARN, text.to_owned(), now);
            (shown, repeats.over(now))
        };
        let shown =
            (0..3412).filter(|number| admit(place(), &format!("disk 'a': {number} s"), start).0);
        assert_eq!(shown.count() as u64, SHOWN);
        assert!(admit(place(), "disk 'b': 1 s", start).0, "another disk");
        let disks = (10..40).filter(|disk| admit(place(), &format!("/vm{disk}: 1 s"), start).0);
        assert_eq!(disks.count(), 30, "others");
        let (_, told) = admit(place(), "disk 'a': 9 s", start + MINUTE);
        assert_eq!(
            told,
            [" WARN 3408 more like this in the last minute: disk 'a': 0 s"]
        );
        // Too many texts count as one.
        let later = start + 3 * MINUTE;
        admit(place(), "", later);
        let names = (b'a'..=b'z').flat_map(|one| (b'a'..=b'z').map(move |two| [one, two]));
        let texts = names.map(|name| String::from_utf8_lossy(&name).into_owned());
        let shown = texts.filter(|text| admit(place(), text, later).0).count();
        assert!(shown <= TEXTS + SHOWN as usize, "{shown}");
    }
}
