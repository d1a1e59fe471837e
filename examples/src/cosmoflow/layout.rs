//! A dry run: how the network lies on a grid, and what memory that takes.

use burn_spatial::layout::Axis;
use burn_spatial::nn::PaddingMode;
use burn_spatial::window::{AxisWindow, WindowPlan};
use burn_spatial::{Grid, Layout};
use burn_spatial_models::CosmoFlowConfig;
use burn_spatial_models::cosmoflow::{Layer, LayerKind};

use super::cli::LayoutArgs;
use crate::common::Error;

const FLOAT: usize = 4;

/// One line of the table; what differs between ranks is that of the rank with the most.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Name of the layer.
    pub name: String,
    /// How its output lies.
    pub layout: Layout,
    /// Voxels of the input that a rank receives, for each sample and channel.
    pub halo: usize,
    /// Bytes that a rank keeps of it for the backward pass.
    pub kept: usize,
}

/// The lines of the table, the input first.
pub fn lines(config: &CosmoFlowConfig, batch: usize, grid: Grid) -> Result<Vec<Line>, Error> {
    let layers = config.summary(batch)?;
    let input = Layout::volume(&[batch, config.inputs, config.width, config.width, config.width], grid);
    let mut lines =
        vec![Line { name: "input".into(), halo: 0, kept: largest(grid, |coords| elements(&input, coords)) * FLOAT, layout: input }];
    for layer in layers {
        let before = &lines[lines.len() - 1].layout;
        let (layout, halo) = follow(&layer, before, grid);
        let kept = largest(grid, |coords| elements(&layout, coords)) * layer.kept;
        lines.push(Line { name: layer.name, layout, halo, kept });
    }
    Ok(lines)
}

fn ranks(grid: Grid) -> impl Iterator<Item = [usize; 4]> {
    (0..grid.ranks()).map(move |rank| grid.coords(rank))
}

fn largest(grid: Grid, of: impl Fn([usize; 4]) -> usize) -> usize {
    ranks(grid).map(of).max().unwrap_or(0)
}

fn elements(layout: &Layout, coords: [usize; 4]) -> usize {
    layout.local_shape(coords).num_elements()
}

/// The layout of a layer's output, and the halo of its input.
fn follow(layer: &Layer, before: &Layout, grid: Grid) -> (Layout, usize) {
    let stride = match layer.kind {
        LayerKind::Dense => {
            // The batch stays split; units are whole.
            let full = Layout::full(&layer.output);
            return (full.with_dim(0, before.dim(0).to_vec()), 0);
        }
        LayerKind::Pool => 2,
        LayerKind::Conv { stride } => stride,
    };
    let window = AxisWindow { kernel: 3, stride, dilation: 1, low: 1, high: 1, mode: PaddingMode::Zeros };
    let mut output = Layout::full(&layer.output).with_dim(0, before.dim(0).to_vec());
    let mut axes = Vec::new();
    for dim in 2..5 {
        let input = before.dim(dim).first().cloned().unwrap_or_else(|| Axis::full(1));
        // An output with fewer voxels than ranks: the axis is gathered first.
        let (input, after) = match window.output_axis(&input) {
            Some(after) => (input, after),
            None => (Axis::full(input.extent()), Axis::full(window.output(input.extent()))),
        };
        output = output.with_dim(dim, vec![after.clone()]);
        axes.push((input, after));
    }
    let halo = largest(grid, |coords| {
        let (mut block, mut own) = (1, 1);
        for (input, after) in &axes {
            let plan = WindowPlan::new(&window, input, after, coords);
            let (start, end) = input.owned(coords);
            let (first, last) = (plan.origin.max(0) as usize, plan.origin.max(0) as usize + plan.local.input);
            block *= last - first;
            own *= last.min(end).saturating_sub(first.max(start));
        }
        block - own
    });
    (output, halo)
}

/// `cosmoflow layout`.
///
/// # Errors
/// [`Error::CosmoFlow`] when there is no such network.
pub fn run(args: &LayoutArgs) -> Result<(), Error> {
    let config = CosmoFlowConfig::new(args.width).with_batch_norm(args.norm.batch_norm);
    let batch = args.batch.get();
    let lines = lines(&config, batch, args.grid)?;
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    println!("grid {}: {} ranks, batch {batch}, float32; of ranks that differ, the one with the most", args.grid, args.grid.ranks());
    println!("{:<7} {:<24} {:<52} {:>12} {:>12}", "", "global shape", "layout", "halo voxels", "kept MiB");
    for line in &lines {
        let shape = format!("{:?}", line.layout.shape().to_vec());
        println!("{:<7} {shape:<24} {:<52} {:>12} {:>12.2}", line.name, line.layout.to_string(), line.halo, mib(line.kept));
    }
    let parameters: usize = config.summary(batch)?.iter().map(|layer| layer.parameters).sum();
    let kept: usize = lines.iter().map(|line| line.kept).sum();
    let weights = parameters * FLOAT;
    println!("\nmemory of a rank in MiB");
    let total = [("activations, kept for the backward pass", kept), ("weights", weights), ("gradients", weights), ("Adam", 2 * weights)];
    for (what, bytes) in total {
        println!("{what:<42} {:>12.2}", mib(bytes));
    }
    println!("{:<42} {:>12.2}", "together", mib(kept + 4 * weights));
    println!("{parameters} parameters. Workspaces and buffers in flight come on top.");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_shrink_with_ranks_and_have_halos() {
        let config = CosmoFlowConfig::new(512);
        let one = lines(&config, 1, Grid::ONE).unwrap();
        let many = lines(&config, 1, Grid([1, 2, 2, 2])).unwrap();
        assert_eq!(one.len(), 1 + 14 + 3);
        assert!(one.iter().all(|line| line.halo == 0));
        assert_eq!((one[0].kept, many[0].kept), (4 * 512 * 512 * 512 * 4, 4 * 256 * 256 * 256 * 4));
        assert_eq!(many[1].layout.to_string(), "[1, 16, 512d(256|256), 512h(256|256), 512w(256|256)]");
        // 257^3 less 256^3: a plane on each of three sides.
        assert_eq!(many[1].halo, 257usize.pow(3) - 256usize.pow(3));
        assert_eq!(many.last().unwrap().layout.shape().to_vec(), [1, 4]);
    }

    #[test]
    fn thin_axes_are_gathered() {
        let lines = lines(&CosmoFlowConfig::new(32), 2, Grid([2, 4, 1, 1])).unwrap();
        let of = |name: &str| lines.iter().find(|line| line.name == name).unwrap();
        assert_eq!(of("pool3").layout.to_string(), "[2n(1|1), 64, 4d(1|1|1|1), 4, 4]");
        assert_eq!(of("conv4").layout.to_string(), "[2n(1|1), 128, 2, 2, 2]");
        assert_eq!(of("fc3").layout.to_string(), "[2n(1|1), 4]");
    }
}
