//! Progress of long work: a bar on a terminal, no output elsewhere.

use indicatif::{ProgressBar, ProgressStyle};
use walvisor_storage::Progress;

/// Runs `work` with a bar, which is shown from the first report of `work` until `work` is done.
pub fn with_bar<T>(doing: &'static str, work: impl FnOnce(Progress<'_>) -> T) -> T {
    let mut shown = None;
    let done = work(&mut |passed, total| {
        let bar = shown.get_or_insert_with(|| bar(doing));
        bar.set_length(total);
        bar.set_position(passed);
    });
    if let Some(bar) = shown {
        bar.finish_and_clear();
    }
    done
}

fn bar(doing: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template(
        "{msg} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
    );
    let bar = ProgressBar::new(0).with_message(doing);
    bar.set_style(style.expect("a template that indicatif knows"));
    bar
}
