//! The class of every voxel of one volume.

use burn::module::AutodiffModule;
use burn::tensor::{Int, Tensor, TensorData};
use burn_spatial::{Layout, place};
use burn_spatial_io::{ChannelAxis, GridRank, Transform, open_file, write_volume};

use super::cli::PredictArgs;
use super::evaluate::fits;
use super::plot::{self, Slice};
use super::train::Segmentation;
use crate::common::data::make_folder;
use crate::common::ranks::{Rank, on_all, on_first};
use crate::common::{Error, Inner, checkpoint};

/// Name of the file with the classes in the output folder.
pub const FILE_NAME: &str = "prediction.hdf5";

/// `unet3d predict` on one rank: each reads its block, and writes the classes of its block. Collective.
///
/// # Errors
/// When data or checkpoint cannot be read or do not fit each other, or the results cannot be written.
pub fn run(rank: Rank, args: &PredictArgs) -> Result<(), Error> {
    let (state, model, _) = checkpoint::load::<Segmentation>(&rank, &args.checkpoint)?;
    let file = open_file(&args.input, rank.mesh.rank()).and_then(|file| file.volume(&args.volume, ChannelAxis::Optional));
    let file = on_all(rank.world(), file.map_err(Error::from))?;
    let shape = file.shape();
    fits(&rank, state.setup.inputs, shape.channels, &args.input)?;
    make_folder(&rank, &args.out)?;

    let bounds = GridRank::of(&rank.mesh).block(shape.extent);
    let mut voxels = Vec::new();
    file.read(bounds, Transform::Identity, &mut Vec::new(), &mut voxels)?;
    state.scaling.apply(&mut voxels);
    let ([d, h, w], [nd, nh, nw]) = (shape.extent, bounds.extent);
    let layout = |channels| Layout::volume(&[1, channels, d, h, w], rank.mesh.grid());
    let voxels = TensorData::new(voxels, [1, shape.channels, nd, nh, nw]);
    let image: Tensor<Inner, 5> = place::from_local(voxels, layout(shape.channels), &rank.device);
    let classes = model.valid().forward(image.clone()).argmax(1);
    // In the blocks that are written, whatever the network made of them.
    let classes = place::to_layout_int(classes, &layout(1));
    let labels: Vec<u8> = place::local_int(classes.clone()).iter::<i64>().map(|class| class as u8).collect();
    let path = args.out.join(FILE_NAME);
    on_all(rank.world(), write_volume(&path, "segmentation", shape.extent, &labels, &rank.mesh).map_err(Error::from))?;

    let slices = slices(&image, &classes, shape.extent);
    on_first(rank.world(), || plot::segmentation(&args.out.join("prediction.png"), &slices, state.setup.classes))?;
    if rank.is_first() {
        println!("the classes of {d} x {h} x {w} voxels in {}", path.display());
    }
    Ok(())
}

/// The middle slices across depth, height and width, of the first channel. Collective; every rank returns the same.
fn slices(image: &Tensor<Inner, 5>, classes: &Tensor<Inner, 5, Int>, extent: [usize; 3]) -> Vec<Slice> {
    let names = ["depth", "height", "width"];
    (0..3)
        .map(|axis| {
            let middle = extent[axis] / 2;
            let mut ranges = [0..1, 0..1, 0..extent[0], 0..extent[1], 0..extent[2]];
            ranges[2 + axis] = middle..middle + 1;
            let [rows, columns] = [[1, 2], [0, 2], [0, 1]][axis].map(|other| extent[other]);
            Slice {
                title: format!("{} {middle}", names[axis]),
                rows,
                columns,
                values: image.clone().slice(ranges.clone()).into_data().iter().collect(),
                classes: classes.clone().slice(ranges).into_data().iter().collect(),
            }
        })
        .collect()
}
